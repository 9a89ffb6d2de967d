"""Starts a server for the GPU benchmarks: the launcher on a free port, stopped when the benchmark ends."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_QWEN3_NEXT = _LLAMA | {
    "max_position_embeddings": 262144,
    "rope_theta": 1e7,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
}
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
SHAPES = {
    "llama-8b": _LLAMA | dict(zip(_SIZES, (4096, 32, 32, 8, 14336), strict=True)),
    "llama-70b": _LLAMA | dict(zip(_SIZES, (8192, 80, 64, 8, 28672), strict=True)),
    "mimo-7b": _LLAMA
    | dict(zip(_SIZES, (4096, 36, 32, 8, 11008), strict=True))
    | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1},
    "llama-8b-eagle": _LLAMA
    | dict(zip(_SIZES, (4096, 1, 32, 8, 14336), strict=True))
    | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
    "qwen3-30b-a3b": _LLAMA
    | dict(zip(_SIZES, (2048, 48, 32, 4, 6144), strict=True))
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": _LLAMA
    | dict(zip(_SIZES, (2880, 24, 64, 8, 2880), strict=True))
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 64,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    "qwen3-next-128-experts": _QWEN3_NEXT
    | dict(zip(_SIZES, (2048, 48, 16, 2, 5120), strict=True))
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 128,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "qwen3.5-9b": _QWEN3_NEXT
    | dict(zip(_SIZES, (4096, 32, 16, 4, 12288), strict=True))
    | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
    "granite-4-small": _LLAMA
    | dict(zip(_SIZES, (4096, 40, 32, 8, 768), strict=True))
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": [("attention" if layer % 10 == 5 else "mamba") for layer in range(40)],
        "attention_multiplier": 0.0078125,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "shared_intermediate_size": 1536,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
}
"""Model shapes to serve with random weights; llama-8b-eagle is a draft model for llama-8b. The vocabulary is SmolLM2's."""
QUANTIZATIONS: dict[str, dict[str, object]] = {
    "int4": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
    "fp8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}
"""Formats of weights, as compressed-tensors names them."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    launcher: subprocess.Popen[bytes]


@contextmanager
def launched(model: Path, arguments: Sequence[str], log: Path) -> Iterator[Server]:
    """Run the launcher with the torch engine on 127.0.0.1 until it is ready; its output goes to `log`."""
    signal.signal(signal.SIGTERM, _exit)
    port = _free_port()
    command = [sys.executable, "-m", "text_generation_launcher", "--model-id", str(model), "--engine", "torch"]
    command += ["--hostname", "127.0.0.1", "--port", str(port), *arguments]
    with log.open("wb") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    server = Server(f"http://127.0.0.1:{port}", launcher)
    try:
        _wait_until_ready(server, log)
        yield server
    finally:
        launcher.terminate()
        try:
            launcher.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            launcher.kill()  # its children exit with it
            launcher.wait()


def shaped_folder(shape: str, tokenizer: Path, folder: Path, quantization: str | None = None) -> Path:
    """Write a model folder without weights: config.json of the shape, tokenizer of another model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(SHAPES[shape])
    if quantization is not None:
        group = {"targets": ["Linear"], "weights": QUANTIZATIONS[quantization]}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    return folder


def last_lines(log: Path, count: int = 20) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def _wait_until_ready(server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (code := server.launcher.poll()) is not None:
            raise SystemExit(f"the launcher ended with {code}:\n{last_lines(log)}")
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise SystemExit(f"the server was not ready within {START_TIMEOUT_S:.0f} s:\n{last_lines(log)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _exit(_signal: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM like an exit, so that the `finally` above stops the launcher."""
    raise SystemExit(143)
