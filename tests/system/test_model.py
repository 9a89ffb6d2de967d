"""Find or download a model: huggingface_hub's own code, with a cache made by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from text_generation_common.exit_codes import CannotServe
from text_generation_common.lifeline import open_lifeline
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.model import resolve_adapters, resolve_model
from text_generation_launcher.shutdown import GracefulShutdown

pytestmark = pytest.mark.system

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """The folder of some/model at main in a hub cache, without weights."""
    repo = tmp_path / "hub" / "models--some--model"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    return snapshot


async def resolve(model_id: str, snapshot: Path, **settings: object) -> Path:
    config = LauncherConfig.of(model_id=model_id, huggingface_hub_cache=str(snapshot.parents[2]), **settings)
    environ = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    with open_lifeline() as lifeline_fd:
        return await resolve_model(config, environ, GracefulShutdown(), lifeline_fd)


async def test_local_folder_is_used_as_it_is(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await resolve(str(tmp_path), snapshot) == tmp_path
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert await resolve("mine", snapshot) == tmp_path / "mine"


async def test_adapters_are_folders_or_found_in_the_cache(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "adapter_model.safetensors").write_bytes(b"")

    async def adapters(text: str) -> str:
        config = LauncherConfig.of(model_id="m", lora_adapters=text, huggingface_hub_cache=str(snapshot.parents[2]))
        environ = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
        with open_lifeline() as lifeline_fd:
            return await resolve_adapters(config, environ, GracefulShutdown(), lifeline_fd)

    both = await adapters(f"some/model@{COMMIT},sql={tmp_path},again=some/model")
    assert both == f"some/model={snapshot},sql={tmp_path},again={snapshot}"
    for text in ("sql=/nothing/here", "some/other"):
        with pytest.raises(CannotServe):
            await adapters(text)


async def test_path_that_is_not_a_folder_is_not_looked_up_on_the_hub(snapshot: Path) -> None:
    for model_id in ("./nothing", "/nothing/here", "~/nothing"):
        with pytest.raises(CannotServe, match=f"^{model_id} is not a folder$"):
            await resolve(model_id, snapshot)
    with pytest.raises(CannotServe, match=r"is not a folder: GGUF is not read, .*launcher convert ./model.gguf FOLDER"):
        await resolve("./model.gguf", snapshot)
    for model_id, reason in (("x" * 5000, "File name too long"), ("~no-such-user/m", "home directory")):
        with pytest.raises(CannotServe, match=f"^the model folder cannot be found: .*{reason}"):
            await resolve(model_id, snapshot)


@pytest.mark.parametrize(
    ("weights", "settings"),
    [
        ("model.safetensors", {"revision": COMMIT}),
        ("rank0.engine", {"engine": "tensorrt-llm"}),
        (None, {"engine": "echo"}),
    ],
)
async def test_model_is_found_in_the_cache(weights: str | None, settings: dict[str, object], snapshot: Path) -> None:
    if weights is not None:
        (snapshot / weights).write_bytes(b"")
    assert await resolve("some/model", snapshot, **settings) == snapshot


@pytest.mark.parametrize(
    ("model_id", "revision", "reason"),
    [
        ("some/other", None, "some/other is not in the cache, and the hub cannot be reached"),
        ("some/model", "v2", "some/model at revision v2 is not in the cache, and the hub cannot be reached"),
        ("not/an/id", None, "not/an/id is neither a local folder nor an id on the hub"),
    ],
)
async def test_missing_model_is_one_line(
    model_id: str, revision: str | None, reason: str, snapshot: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CannotServe, match="failed with exit code 1"):
        await resolve(model_id, snapshot, revision=revision)
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "process=download" in line]) == 1
    assert reason in lines[-1]


@pytest.mark.parametrize(
    ("engine", "weights", "wanted"),
    [
        ("torch", "rank0.engine", "*.safetensors"),
        ("tensorrt-llm", "pytorch_model.bin", "*.safetensors or *.engine"),
    ],
)
async def test_model_without_supported_weights_is_rejected(
    engine: str, weights: str, wanted: str, snapshot: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (snapshot / weights).write_bytes(b"")
    with pytest.raises(CannotServe):
        await resolve("some/model", snapshot, engine=engine)
    assert f"some/model has no {wanted} weights; no other format is supported" in capfd.readouterr().err
