"""`text-generation-launcher check`: what would be served, with how much memory, or why not, as a start finds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from byte_tokenizer import write_tokenizer
from model_families import FAMILIES, random_model, tiny_config, write_model
from safetensors.torch import save_file
from tiny_checkpoint import CONFIG, random_tensors

from text_generation_launcher.config import size_in_bytes
from text_generation_launcher.download import write_header
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.check import check
from text_generation_shard.config import ShardCheckConfig, ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines import build_engine

LARGE = CONFIG | {
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "head_dim": 128,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""The shape of Llama 3 70B."""
CHAT = "{% for m in messages %}<tool_call>{{ m.content }}{% endfor %}{{ tools }}"


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "text_generation_launcher", "check", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ, check=False)
    return done.returncode, json.loads(done.stdout)


def write_large(folder: Path) -> None:
    """Write a checkpoint of 141 GB whose files have headers and no weights."""
    hidden, inner = LARGE["hidden_size"], LARGE["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (LARGE["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    for layer in range(LARGE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        for name, rows, columns in (
            *(("self_attn.q_proj", hidden, hidden), ("self_attn.o_proj", hidden, hidden)),
            *(("self_attn.k_proj", 1024, hidden), ("self_attn.v_proj", 1024, hidden)),
            *(("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner)),
        ):
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
    for number, (name, shape) in enumerate(shapes.items()):
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensor = SimpleNamespace(dtype="BF16", shape=shape, data_offsets=(0, size))
        write_header(folder / f"model-{number:03}.safetensors", {name: tensor})
    (folder / "config.json").write_text(json.dumps(LARGE), encoding="utf-8")


@pytest.mark.full
def test_a_large_model_is_planned_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    write_large(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    code, found = run(
        *("--memory", "80GiB", "--num-shard", "8", str(tmp_path), "--engine", "torch", "--host-cache-size", "64GiB"),
        *("--num-replicas", "2", "--prefill-replicas", "1"),
    )
    assert (code, found["served"], found["engine"], found["code"]) == (0, True, "torch", "native")
    layers = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192)
    embeddings = 128256 * 8192
    assert found["memory"]["weights"] == 2 * (layers // 8 + embeddings + embeddings // 8 + 161 * 8192)
    assert found["memory"]["kv_cache_token"] == 80 * 2 * 128 * 2, "one KV head on each device"
    fitting = found["memory"]["kv_cache_left"] // found["memory"]["kv_cache_token"]
    assert fitting - 16 < found["kv_cache_tokens"] <= fitting
    assert 40 << 30 < found["memory"]["kv_cache_left"] < 80 * 2**30 - found["memory"]["weights"]
    host = found["cache_groups"][0]["host_blocks"] * 16 * found["memory"]["kv_cache_token"]
    assert (8 << 30) - (1 << 20) < host <= 8 << 30, "an eighth of the host cache"
    assert (found["max_total_tokens"], found["full_streams"]) == (131072, found["kv_cache_tokens"] // 131072)
    assert (found["chat_template"], found["tool_call_parser"]) == (["default"], "hermes")
    code, found = run(str(tmp_path), "--engine", "torch", "--host-cache-size", "4096TiB")
    assert (code, found["served"]) == (1, False)
    assert "the machine has" in found["reason"], "there is no --memory of another one"
    with pytest.raises(EngineError, match=r"weights of 131\.4 GiB, and there are only 80\.0 GiB"):
        check(ShardCheckConfig(engine="torch", model_path=str(tmp_path), memory=80 << 30))


@pytest.mark.full
def test_limits_that_the_model_cannot_meet_are_refused_with_the_words_of_a_start(tmp_path: Path) -> None:
    save_file(random_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    write_tokenizer(tmp_path)
    code, found = run(str(tmp_path), "--max-total-tokens", "300", "--max-input-tokens", "200", "--engine", "torch")
    assert (code, found["reason"]) == (1, "`max_total_tokens`(300) is more than the model's 256 positions")


@pytest.mark.parametrize("problem", ["no tensor", "wrong shape", "truncated", "unknown type", "quantize"])
def test_a_model_is_refused_with_the_words_of_the_engine(tmp_path: Path, problem: str) -> None:
    tensors, config, settings = random_tensors(), dict(CONFIG), {"model_path": str(tmp_path), "device": "cpu"}
    match problem:
        case "no tensor":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        case "wrong shape":
            tensors["model.norm.weight"] = tensors["model.norm.weight"][:8].clone()
        case "unknown type":
            config["model_type"] = "abacus"
        case "quantize":
            settings["quantize"] = "awq"
    save_file(tensors, tmp_path / "model.safetensors")
    if problem == "truncated":
        os.truncate(tmp_path / "model.safetensors", 5000)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(EngineError) as refused:
        build_engine(ShardConfig(**settings, engine="torch"))
    with pytest.raises(EngineError) as checked:
        check(ShardCheckConfig(**settings, engine="torch"))
    assert str(checked.value) == str(refused.value)


def test_the_process_of_a_check_ends_with_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file(random_tensors(), tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "pid")
    stand_in = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (tmp_path / "torch.py").write_text(stand_in, encoding="utf-8")
    environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "text_generation_launcher", "check", str(tmp_path), "--engine", "torch"]
    with subprocess.Popen(command, env=environ) as launcher:
        shard = psutil.Process(int((tmp_path / "pid").read_text(encoding="ascii")))
        assert shard.pid != launcher.pid
        launcher.kill()
    psutil.wait_procs([shard], timeout=20)
    assert not shard.is_running()


def test_transformers_and_native_code_take_the_same_memory(tmp_path: Path) -> None:
    save_file(tensors := random_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    settings = {"engine": "torch", "model_path": str(tmp_path), "device": "cpu"}
    found = [check(ShardCheckConfig(**settings, model_impl=code)) for code in ("native", "transformers")]
    assert [each["code"] for each in found] == ["native", "transformers"]
    for each in found:
        assert each["memory"]["weights"] == sum(tensor.nbytes for tensor in tensors.values())
        assert each["memory"]["kv_cache_token"] == 2 * 2 * 2 * 16 * 4
    fp8 = check(ShardCheckConfig(**settings, kv_cache_dtype="fp8_e5m2"))
    assert fp8["memory"]["kv_cache_token"] == 2 * 2 * 2 * 16


@pytest.mark.parametrize("name", ["olmoe", "llama4_text"])
def test_the_cache_of_a_mixture_that_transformers_runs_is_known(tmp_path: Path, name: str) -> None:
    """Its layers are followed on another device than that of new tensors, as on a GPU, and in float32."""
    write_model(random_model(tiny_config(name, FAMILIES[name].changes)), tmp_path)
    settings = {"engine": "torch", "model_path": str(tmp_path), "device": "cpu", "model_impl": "transformers"}
    assert check(ShardCheckConfig(**settings))["memory"]["kv_cache_token"] == 4 * 2 * 2 * 16 * 4
    on_gpu = check(ShardCheckConfig(**settings | {"device": "auto"}, memory=80 << 30))
    assert on_gpu["max_sequence_length"] == (24 if name == "llama4_text" else 256), "kernels know no chunks"


@pytest.mark.parametrize("sequences", [0, 16])
def test_groups_are_those_of_a_warm_up_with_the_same_limits(tmp_path: Path, sequences: int) -> None:
    save_file(random_tensors(), tmp_path / "model.safetensors")
    config = CONFIG | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 20}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = {"engine": "torch", "model_path": str(tmp_path), "device": "cpu", "max_batch_size": sequences}
    found = check(ShardCheckConfig(**settings, max_batch_prefill_tokens=32, max_batch_total_tokens=1024))
    warm = build_engine(ShardConfig(**settings)).warm_up(WarmUpLimits(32, sequences, 1024))
    assert [each["blocks"] for each in found["cache_groups"]] == [each.num_blocks for each in warm]
    assert warm[1].num_blocks == (64 if sequences else 64 * (20 + 64) // 256)


def test_sizes_of_memory() -> None:
    assert [size_in_bytes(text) for text in ("80GiB", "0.5T", "24G", "1024", "1MB", "")] == [
        *(80 << 30, 1 << 39, 24 << 30, 1024, 1 << 20, 0)
    ]
    for text in ("80X", "GiB", "-1G", "0G", "1 2G"):
        with pytest.raises(ValueError, match="expected a size"):
            size_in_bytes(text)
