"""Checks of the settings: the rules for the engine, and their place before the search for the model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from text_generation_common.exit_codes import ExitCode
from text_generation_launcher.checks import check_engine
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.counts import PlanError
from text_generation_launcher.launch import launch, socket_folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tensorrt_llm that must not be imported, and its programs."""
    package = tmp_path / "site" / "tensorrt_llm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemError('imported')\n")
    monkeypatch.syspath_prepend(str(package.parent))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("mpirun", "trtllm-llmapi-launch"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    return tmp_path


def check(folder: Path | None = None, **settings: object) -> None:
    environ = {} if folder is None else {"PATH": str(folder / "bin")}
    check_engine(LauncherConfig.of(**{"model_id": "m", "engine": "tensorrt-llm", **settings}), environ)


def rejection(folder: Path | None = None, **settings: object) -> str:
    with pytest.raises(PlanError) as error:
        check(folder, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_valid_settings_pass_without_importing_tensorrt_llm(installed: Path) -> None:
    check(installed)
    check(installed, trtllm_options="max_num_tokens: 4096", trtllm_launch="mpirun", num_shard=2)
    check(installed, trtllm_launch="mpirun", sharded=True)
    assert "tensorrt_llm" not in sys.modules


@pytest.mark.parametrize("engine", ["torch", "echo"])
def test_tensorrt_llm_flags_are_rejected_for_other_engines(engine: str) -> None:
    check(engine=engine)
    reason = f"is for the tensorrt-llm engine, and the engine is {engine}"
    assert rejection(engine=engine, trtllm_options="{max_num_tokens: 4096}") == f"--trtllm-options {reason}"
    assert rejection(engine=engine, trtllm_launch="mpirun") == f"--trtllm-launch mpirun {reason}"


def test_ranks_of_several_hosts_and_stages(installed: Path) -> None:
    check(installed, trtllm_launch="mpirun", num_shard=4, trtllm_hosts=("a", "b"))
    check(installed, num_shard=4, trtllm_options="{pipeline_parallel_size: 2}")
    assert "needs --num-shard" in rejection(installed, trtllm_launch="mpirun", sharded=True, trtllm_hosts=("a", "b"))
    for stages in ("3", "0", "true", "two"):
        options = f"{{pipeline_parallel_size: {stages}}}"
        refused = rejection(installed, num_shard=4, trtllm_options=options)
        assert "pipeline_parallel_size must divide the number of GPUs (4, --num-shard), not" in refused


def test_missing_tensorrt_llm_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "tensorrt_llm").exists()])
    assert rejection() == "the tensorrt-llm engine needs TensorRT-LLM: see docs/tensorrt-llm.md for how to install it"


SEVERAL_GPUS = "--trtllm-launch mpirun starts the processes of several GPUs: it needs --num-shard"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"device": "cpu"}, "`device` is cpu, and the tensorrt-llm engine runs on GPUs only"),
        ({"trtllm_options": "{max_num_tokens: "}, "--trtllm-options: "),
        ({"trtllm_options": "{dtype: auto, model: a}"}, "dtype is not set here: use --dtype; model is not set here"),
        ({"trtllm_options": "engine.yaml"}, "engine.yaml: there is no such file"),
        (
            {"nodes": 2, "num_shard": 2, "leader_address": "head", "shard_token": "t", "insecure": True},
            "is spread over several hosts by --trtllm-launch mpirun and --trtllm-hosts",
        ),
        *(({"trtllm_launch": "mpirun", **few}, SEVERAL_GPUS) for few in ({}, {"num_shard": 1}, {"sharded": False})),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, object], text: str, installed: Path) -> None:
    assert text in rejection(installed, **settings)


@pytest.mark.parametrize(
    ("program", "origin"),
    [("mpirun", "it comes with Open MPI (openmpi-bin)"), ("trtllm-llmapi-launch", "it comes with TensorRT-LLM")],
)
def test_missing_program_is_named(program: str, origin: str, installed: Path) -> None:
    (installed / "bin" / program).unlink()
    message = rejection(installed, trtllm_launch="mpirun", num_shard=2)
    assert message == f"--trtllm-launch mpirun needs {program}, which is not on PATH: {origin}"


def test_python_path_with_shell_characters_is_rejected(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my programs/python")
    assert "has characters that a shell changes" in rejection(installed, trtllm_launch="mpirun", num_shard=2)


# -------------------------------------------------------------------------------------------------------------- launch

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0", "PATH": ""}
OPTIONS = "no-such.yaml: there is no such file"
TORCH = "--trtllm-options is for the tensorrt-llm engine, and the engine is torch"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("environ", "settings", "reason"),
    [
        # `auto` is TensorRT-LLM if that is installed and there is a GPU for it.
        (ONE_GPU, {}, OPTIONS),
        (NO_GPU, {}, TORCH),
        (ONE_GPU, {"device": "cpu"}, TORCH),
        (NO_GPU, {"engine": "tensorrt-llm"}, OPTIONS),
        (ONE_GPU, {"engine": "torch"}, TORCH),
        (ONE_GPU, {"num_shard": 2}, "2 shards take one each (--num-replicas 1, --num-shard 2), and 1 are visible"),
        (
            ONE_GPU,
            {"trtllm_options": "{tensor_parallel_size: 4}"},
            "4 shards take one each (--num-replicas 1, --num-shard 4), and 1 are",
        ),
        (
            ONE_GPU,
            {"trtllm_options": "{pipeline_parallel_size: 2}"},
            "2 shards take one each (--num-replicas 1, --num-shard 2), and 1 are",
        ),
    ],
)
async def test_settings_are_rejected_before_the_model_is_resolved(
    environ: dict[str, str], settings: dict[str, object], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = LauncherConfig.of(**{"model_id": "/no/such/model", "trtllm_options": "no-such.yaml", **settings})
    assert await launch(config, environ) == ExitCode.USAGE
    out, err = capfd.readouterr()
    assert reason in next(line for line in (out + err).splitlines() if "settings refused" in line)


def test_the_folder_of_sockets_has_an_absolute_path() -> None:
    with socket_folder({"TMPDIR": "."}) as folder:
        assert folder.parent == Path.cwd()
