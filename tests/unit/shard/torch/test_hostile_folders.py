"""Model folders made to do harm: each is refused in one line, at once, without memory, and no file outside is read."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_folders import ENGINE, RANKS, fill
from safetensors.torch import save_file
from tiny_checkpoint import CONFIG, random_tensors, write_checkpoint

from text_generation_common.exit_codes import ExitCode
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.tensorrt_llm.engine_folder import CompiledEngine, check_engine
from text_generation_shard.engines.tensorrt_llm.folder import inspect_folder, read_hugging_face_model
from text_generation_shard.engines.torch.device.memory import peak_memory, reset_peak

INDEX = "model.safetensors.index.json"
MOST_SECONDS = 1.0
"""Seconds of processor time: the machine may be busy."""
MOST_BYTES = 160 << 20
LARGE = {"hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 1 << 10, "vocab_size": 1 << 22}
"""Sizes within the limits, for 400 TiB of weights."""
YARN = {"rope_type": "yarn", "factor": 1e6}
NESTED = '{"model_type": "llama", "x": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}"

CONFIGS: list[tuple[dict[str, Any] | str, str]] = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not a whole number from 1 to 1024"),
    ({"hidden_size": 10**9}, "hidden_size is 1000000000, not"),
    ({"hidden_size": -64}, "hidden_size is -64, not"),
    ({"hidden_size": 1e9}, "hidden_size is 1000000000.0, not"),
    ({"vocab_size": 10**12}, "vocab_size is 1000000000000, not"),
    ({"max_position_embeddings": 10**18}, "max_position_embeddings is 1000000000000000000, not"),
    ({"intermediate_size": float("nan")}, "intermediate_size is nan, not"),
    ({"num_attention_heads": 4096, "head_dim": None}, "head_dim is 0, not"),
    ({"rms_norm_eps": 10**4000}, "rms_norm_eps is 1000"),
    ({"rope_theta": float("inf")}, "rope_theta is inf, not"),
    ({"rope_theta": 1}, "rope_theta is 1, not a number from 2"),
    ({"rope_scaling": YARN}, "YaRN extends the sequences to 256000000 positions"),
    ({"rope_scaling": YARN | {"factor": 2, "mscale": "x" * 10**6}}, "mscale is 'xxxxx"),
    (
        {"rope_scaling": YARN | {"original_max_position_embeddings": 0.1}},
        "original_max_position_embeddings is 0.1, not",
    ),
    ({"eos_token_id": [2**40]}, "eos_token_id is [1099511627776], not"),
    ({"eos_token_id": [2] * 10**6}, "not a token id or a list of at most 256"),
    ({"model_type": "x" * 10**6}, "model_type 'xxxxx"),
    ({"architectures": 5}, "architectures is 5, not a list of names"),
    ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', not a list of names"),
    ({"architectures": ["x" * 10**6]}, "is not supported, only LlamaForCausalLM"),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": [{}, []]},
        "layer types [{}] are not supported",
    ),
    (NESTED, "config.json is no JSON"),
    ("9" * 5000, "config.json is no JSON"),
    (LARGE, "config.json describes weights of"),
]


def refusal(folder: Path) -> str:
    """Return the line with which the torch engine refuses a folder."""
    reset_peak()
    before, started = peak_memory(), time.process_time()
    with pytest.raises(EngineError) as caught:
        build_engine(ShardConfig(engine="torch", model_path=str(folder), device="cpu", model_impl="native"))
    assert time.process_time() - started < MOST_SECONDS
    assert peak_memory() - before < MOST_BYTES
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[message for _, message in CONFIGS])
def test_a_config_with_absurd_values_is_refused(tmp_path: Path, config: dict[str, Any] | str, message: str) -> None:
    text = config if isinstance(config, str) else json.dumps(CONFIG | config)
    (tmp_path / "config.json").write_text(text)
    assert message in refusal(tmp_path)


def test_sizes_far_beyond_the_checkpoint_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 30_000, "num_hidden_layers": 200}
    for quantization in (None, {"quant_method": "fp8"}):
        write_checkpoint(tmp_path, random_tensors(), sizes | {"quantization_config": quantization})
        assert "config.json describes 1,156,138,368 weights, and the checkpoint has only" in refusal(tmp_path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


def leave(path: Path) -> None:
    """Move a file out of the folder and link to it."""
    target = path.rename(path.parent.parent / path.name)
    path.symlink_to(target)


def named_pipe(path: Path) -> None:
    path.unlink()
    subprocess.run(["mkfifo", path], check=True)


def index(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(json.dumps({"weight_map": dict.fromkeys(random_tensors(), name)}))

    return write


FILES: list[tuple[str, Callable[[Path], None], str]] = [
    ("config.json", huge, "config.json is larger than 4 MiB"),
    ("config.json", leave, "'config.json' leads out of the model folder"),
    ("config.json", named_pipe, "config.json cannot be read: it is not a file"),
    ("generation_config.json", huge, "generation_config.json is larger than 4 MiB"),
    ("hf_quant_config.json", huge, "hf_quant_config.json is larger than 4 MiB"),
    ("model.safetensors", leave, "'model.safetensors' leads out of the model folder"),
    (INDEX, huge, "index.json is larger than 32 MiB"),
    (INDEX, index("../outside.safetensors"), "'../outside.safetensors' leads out of the model folder"),
    (INDEX, index("/etc/passwd"), "'/etc/passwd' leads out of the model folder, to /etc/passwd: copy"),
    (INDEX, index("a\0b"), "cannot be read: embedded null byte"),
]


@pytest.mark.parametrize(("name", "damage", "message"), FILES, ids=[message for *_, message in FILES])
def test_a_file_too_large_or_outside_the_folder_is_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", random_tensors())
    save_file(random_tensors(), tmp_path / "outside.safetensors")
    damage(folder / name)
    assert message in refusal(folder)


def test_a_snapshot_of_the_hub_links_to_the_blobs_of_its_repository_only(tmp_path: Path) -> None:
    """The cache itself may be reached by a link, too."""
    for repository in ("models--ours", "models--theirs"):
        (tmp_path / repository / "blobs").mkdir(parents=True)
        (tmp_path / repository / "snapshots").mkdir()
    write_checkpoint(tmp_path / "blobs", random_tensors())
    snapshot = tmp_path / "models--ours" / "snapshots" / "0123"
    snapshot.mkdir()
    for path in (tmp_path / "blobs").iterdir():
        path.rename(tmp_path / "models--ours" / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (tmp_path / "link").symlink_to(snapshot)
    assert build_engine(ShardConfig(engine="torch", model_path=str(tmp_path / "link"), device="cpu")).info.max_slots
    config = tmp_path / "models--theirs" / "blobs" / "config.json"
    config.write_bytes((snapshot / "config.json").read_bytes())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(config)
    assert "leads out of the model folder" in refusal(snapshot)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ENGINE | {"pretrained_config": ENGINE["pretrained_config"] | {"vocab_size": 10**12}}, "vocab_size is 1000"),
        (ENGINE | {"build_config": ENGINE["build_config"] | {"max_seq_len": 10**18}}, "max_seq_len is 1000"),
        (
            {"architectures": ["X"], "num_hidden_layers": 10**9, "vocab_size": 9},
            "num_hidden_layers is 1000000000, more",
        ),
        ({"architectures": ["X"], "text_config": {"hidden_size": 1e9}, "vocab_size": 9}, "hidden_size is 1000000000.0"),
        ({"architectures": ["X"], "vocab_size": 9, "n_positions": 10**18}, "does not say how long a sequence may be"),
        (None, "'rank1.engine' leads out of the model folder"),
    ],
)
def test_tensorrt_llm_is_not_given_absurd_values(tmp_path: Path, config: dict[str, Any] | None, message: str) -> None:
    folder = fill(tmp_path / "model", config or ENGINE, RANKS)
    if config is None:
        leave(folder / "rank1.engine")
    with pytest.raises(EngineError) as caught:
        found = inspect_folder(folder)
        if isinstance(found, CompiledEngine):
            check_engine(folder, found, world_size=2, installed="1.2.1")
        else:
            read_hugging_face_model(found)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_process_ends_with_one_line_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 10**9}))
    done = subprocess.run(
        [
            Path(sys.executable).with_name("text-generation-shard"),
            *("--engine", "torch", "--device", "cpu", "--model-path", str(tmp_path)),
            *("--address", f"unix://{tmp_path}/socket", "--json-output"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == ExitCode.FAILED
    records = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    assert [record["event"] for record in records] == ["loading", "cannot serve"]
    assert "num_hidden_layers is 1000000000" in records[-1]["reason"]
