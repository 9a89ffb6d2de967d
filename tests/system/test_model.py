"""From --model-id to a folder: huggingface_hub's own code, on a cache made by hand."""

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
def cache(tmp_path: Path) -> Path:
    """A hub cache with some/model at main: configuration and weights."""
    repo = tmp_path / "hub" / "models--some--model"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    return tmp_path / "hub"


async def resolve(model_id: str, cache: Path, **settings: object) -> Path:
    config = LauncherConfig.of(model_id=model_id, huggingface_hub_cache=str(cache), **settings)
    environ = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    with open_lifeline() as lifeline_fd:
        return await resolve_model(config, environ, GracefulShutdown(), lifeline_fd)


async def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await resolve(str(tmp_path), tmp_path) == tmp_path
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert await resolve("mine", tmp_path) == tmp_path / "mine"


@pytest.mark.parametrize("model_id", ["./nothing", "/nothing/here", "~/nothing"])
async def test_a_path_that_is_no_folder_is_not_looked_for_on_the_hub(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"^{model_id} is not a folder$"):
        await resolve(model_id, tmp_path)


async def test_an_id_is_found_in_the_cache(cache: Path) -> None:
    expected = cache / "models--some--model" / "snapshots" / COMMIT
    assert await resolve("some/model", cache) == expected
    assert await resolve("some/model", cache, revision=COMMIT) == expected


@pytest.mark.parametrize(
    ("model_id", "revision", "reason"),
    [
        ("some/other", None, "some/other is not in the cache, and the hub cannot be reached"),
        ("some/model", "v2", "some/model at revision v2 is not in the cache, and the hub cannot be reached"),
        ("not/an/id", None, "not/an/id is neither a local folder nor an id on the hub"),
    ],
)
async def test_a_model_that_is_not_to_be_had_is_one_clear_line(
    model_id: str, revision: str | None, reason: str, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match="failed with exit code 1"):
        await resolve(model_id, cache, revision=revision)
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "process=download" in line]) == 1
    assert reason in lines[-1]


async def test_weights_that_are_pickles_are_not_enough(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    snapshot = cache / "models--some--model" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    with pytest.raises(ModelError):
        await resolve("some/model", cache)
    assert "some/model has no *.safetensors weights" in capfd.readouterr().err


@pytest.mark.parametrize("settings", [{"engine": "echo"}, {"load_format": "dummy"}])
async def test_without_need_for_weights_none_are_wanted(settings: dict[str, object], cache: Path) -> None:
    snapshot = cache / "models--some--model" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    assert await resolve("some/model", cache, **settings) == snapshot
