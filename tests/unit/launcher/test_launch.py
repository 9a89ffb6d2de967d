"""What the launcher settles before it looks for a model: the engine, and whether its settings can work here."""

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
    """There is a tensorrt_llm, which must not be imported."""
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))


async def refusal(capfd: pytest.CaptureFixture[str], environ: dict[str, str], **settings: object) -> str:
    """Why nothing is started. There is no such model: who gets as far as looking for it fails otherwise."""
    config = LauncherConfig.of(**{"model_id": "/no/such/model", "trtllm_options": "no-such.yaml", **settings})
    assert await launch(config, environ) == ExitCode.USAGE
    out, err = capfd.readouterr()
    return next(line for line in (out + err).splitlines() if "settings refused" in line)


@pytest.mark.usefixtures("installed")
async def test_auto_is_tensorrt_llm_where_it_is_installed_and_there_is_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert "no-such.yaml: there is no such file" in await refusal(capfd, ONE_GPU)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("environ", "settings"), [(NO_GPU, {}), (ONE_GPU, {"device": "cpu"})])
async def test_auto_is_torch_where_there_is_no_gpu(
    environ: dict[str, str], settings: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    said = await refusal(capfd, environ, **settings)
    assert "--trtllm-options is for the tensorrt-llm engine, and the engine is torch" in said


@pytest.mark.usefixtures("installed")
async def test_who_names_the_engine_gets_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert "no-such.yaml: there is no such file" in await refusal(capfd, NO_GPU, engine="tensorrt-llm")
    assert "the engine is torch" in await refusal(capfd, ONE_GPU, engine="torch")


@pytest.mark.usefixtures("installed")
async def test_gpus_are_counted_before_a_model_is_looked_for(capfd: pytest.CaptureFixture[str]) -> None:
    said = await refusal(capfd, ONE_GPU, num_shard=2)
    assert "not enough cuda devices: 2 shards take one each (--num-shard), and 1 are visible" in said
