"""Model folders of the kinds that TensorRT-LLM knows, and a tensorrt_llm that must not be imported."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from text_generation_shard.engines.tensorrt_llm.engine_folder import CompiledEngine
from text_generation_shard.engines.tensorrt_llm.folder import inspect_folder

ENGINE: dict[str, Any] = {
    "version": "1.2.1",
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "mapping": {"world_size": 2, "gpus_per_node": 8, "cp_size": 1, "tp_size": 2, "pp_size": 1},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "group_size": 128},
    },
    "build_config": {
        "max_input_len": 1024,
        "max_seq_len": 4096,
        "max_batch_size": 64,
        "max_beam_width": 1,
        "max_num_tokens": 8192,
        "opt_num_tokens": 64,
        "kv_cache_type": "paged",
        "gather_context_logits": False,
        "gather_generation_logits": True,
        "max_draft_len": 0,
        "plugin_config": {
            "gpt_attention_plugin": "auto",
            "context_fmha": True,
            "paged_kv_cache": True,
            "remove_input_padding": True,
            "tokens_per_block": 64,
            "use_paged_context_fmha": True,
        },
    },
}
"""config.json as trtllm-build of 1.2.1 writes it: the keys that are read, and some others."""
RANKS = {"rank0.engine": b"plan", "rank1.engine": b"plan"}
HUGGING_FACE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
CHECKPOINT = {"architecture": "LlamaForCausalLM", "dtype": "float16", "mapping": {"world_size": 1}}


def engine(**changes: object) -> dict[str, Any]:
    """Return ENGINE with changes at nested keys, joined by two underscores; the value `...` removes the key."""
    config = copy.deepcopy(ENGINE)
    for place, value in changes.items():
        change(config, place.split("__"), value)
    return config


def change(config: dict[str, Any], keys: list[str], value: object) -> None:
    for key in keys[:-1]:
        config = config[key]
    if value is ...:
        del config[keys[-1]]
    else:
        config[keys[-1]] = value


def mapping(**sizes: object) -> dict[str, Any]:
    return engine(pretrained_config__mapping=sizes)


def fill(folder: Path, config: object, files: Mapping[str, bytes]) -> Path:
    """Write `config`, an object or the bytes of its file, and `files` to a folder."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def poison(folder: Path, name: str) -> None:
    """Write a package to `folder` that leaves a mark there when it is imported."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(
        "from pathlib import Path\nPath(__file__).parents[1].joinpath('mark').touch()\nraise RuntimeError('imported')\n"
    )


@contextmanager
def nothing_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a poisoned tensorrt_llm in `folder` on the path, and assert that it was not imported, even if the error is caught."""
    poison(folder, "tensorrt_llm")
    monkeypatch.delitem(sys.modules, "tensorrt_llm", raising=False)
    monkeypatch.syspath_prepend(folder)
    yield
    assert "tensorrt_llm" not in sys.modules
    assert not (folder / "mark").exists(), "tensorrt_llm was imported"


def compiled_engine(folder: Path) -> CompiledEngine:
    """Return the configuration of the engines in a folder."""
    found = inspect_folder(folder)
    assert isinstance(found, CompiledEngine)
    return found
