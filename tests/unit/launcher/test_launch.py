"""Checks of the launcher before it looks for a model: the choice of the engine, and settings that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.launch import launch
from text_generation_proto.exit_codes import ExitCode

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0", "PATH": ""}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a tensorrt_llm that must not be imported."""
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))


async def rejection(capfd: pytest.CaptureFixture[str], environ: dict[str, str], **settings: object) -> str:
    """Return the reason of the rejection. The model does not exist, so a later check would fail differently."""
    config = LauncherConfig.of(**{"model_id": "/no/such/model", "trtllm_options": "no-such.yaml", **settings})
    assert await launch(config, environ) == ExitCode.USAGE
    out, err = capfd.readouterr()
    return next(line for line in (out + err).splitlines() if "settings refused" in line)


@pytest.mark.usefixtures("installed")
async def test_auto_chooses_tensorrt_llm_if_installed_with_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert "no-such.yaml: there is no such file" in await rejection(capfd, ONE_GPU)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("environ", "settings"), [(NO_GPU, {}), (ONE_GPU, {"device": "cpu"})])
async def test_auto_chooses_torch_without_a_gpu(
    environ: dict[str, str], settings: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    message = await rejection(capfd, environ, **settings)
    assert "--trtllm-options is for the tensorrt-llm engine, and the engine is torch" in message


@pytest.mark.usefixtures("installed")
async def test_named_engine_is_used(capfd: pytest.CaptureFixture[str]) -> None:
    assert "no-such.yaml: there is no such file" in await rejection(capfd, NO_GPU, engine="tensorrt-llm")
    assert "the engine is torch" in await rejection(capfd, ONE_GPU, engine="torch")


@pytest.mark.usefixtures("installed")
async def test_gpus_are_counted_before_the_model_is_resolved(capfd: pytest.CaptureFixture[str]) -> None:
    message = await rejection(capfd, ONE_GPU, num_shard=2)
    assert "not enough cuda devices: 2 shards take one each (--num-shard), and 1 are visible" in message
