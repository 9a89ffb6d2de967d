"""What a gateway is told of the model and of the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_shard.engine import EngineInfo

BACKEND = "tensorrt-llm"
_PACKAGES = {"tensorrt-llm": "tensorrt_llm"}
"""Engines that are packages of their own, with a version of their own."""


def model_info(info: EngineInfo, folder: Path | None) -> pb.GetModelInfoResponse:
    """What the engine says, and the model's size as far as its folder does."""
    config = _config(folder)
    features = ["guided_decoding"] if info.grammar_kinds else []
    if folder is not None and (folder / "tokenizer.json").is_file():
        features.append("stop_strings")
    return pb.GetModelInfoResponse(
        model_id=info.model_id,
        max_input_len=info.max_sequence_length - 1,
        max_seq_len=info.max_sequence_length,
        max_batch_size=info.max_slots,
        vocab_size=info.vocab_size,
        hidden_size=_number(config, "hidden_size"),
        num_layers=_number(config, "num_hidden_layers"),
        num_heads=_number(config, "num_attention_heads"),
        supported_features=features,
    )


def server_info(info: EngineInfo, tensor_parallel: int) -> pb.GetServerInfoResponse:
    """One replica: tensor parallel over `tensor_parallel` devices, and in no other way."""
    return pb.GetServerInfoResponse(
        version=_version(info.engine),
        backend=BACKEND,
        tensor_parallel_size=tensor_parallel,
        pipeline_parallel_size=1,
        context_parallel_size=1,
        world_size=tensor_parallel,
    )


def _version(engine: str) -> str:
    try:
        return version(_PACKAGES.get(engine, "text-generation-trtllm"))
    except PackageNotFoundError:  # on the path without having been installed
        return version("text-generation-trtllm")


def _config(folder: Path | None) -> Mapping[str, object]:
    """config.json's words on the decoder; empty where there are none."""
    if folder is None:
        return {}
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    # A compiled engine's and a multimodal model's stand one level down.
    for key in ("pretrained_config", "text_config"):
        if isinstance(config, dict) and isinstance(config.get(key), dict):
            config = config[key]
    return config if isinstance(config, dict) else {}


def _number(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else 0
