"""What counts as the weights of a model on the hub: huggingface_hub's own code, on a cache made by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.model import ModelError, resolve_model
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_proto.lifeline import open_lifeline

pytestmark = pytest.mark.system

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """some/model at main, as it lies in the cache: no weights yet."""
    repo = tmp_path / "hub" / "models--some--model"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    return snapshot


async def resolve(snapshot: Path, engine: str) -> Path:
    cache = snapshot.parents[2]
    config = LauncherConfig.of(model_id="some/model", huggingface_hub_cache=str(cache), engine=engine)
    environ = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    with open_lifeline() as lifeline_fd:
        return await resolve_model(config, environ, GracefulShutdown(), lifeline_fd)


@pytest.mark.parametrize("name", ["model.safetensors", "rank0.engine"])
async def test_compiled_engines_are_as_good_as_weights_to_tensorrt_llm(name: str, snapshot: Path) -> None:
    (snapshot / name).write_bytes(b"")
    assert await resolve(snapshot, "tensorrt-llm") == snapshot


async def test_compiled_engines_are_nothing_to_another_engine(
    snapshot: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (snapshot / "rank0.engine").write_bytes(b"")
    with pytest.raises(ModelError):
        await resolve(snapshot, "torch")
    assert "some/model has no *.safetensors weights; no other format is supported" in capfd.readouterr().err


async def test_without_either_the_model_is_refused(snapshot: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (snapshot / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError):
        await resolve(snapshot, "tensorrt-llm")
    said = capfd.readouterr().err
    assert "some/model has no *.safetensors or *.engine weights; no other format is supported" in said
