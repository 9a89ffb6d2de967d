"""Descriptions of the model and the server for a gateway, and its copy of the tokenizer.

The tokenizer travels as one zip archive, for a gateway without the model folder. Its files and format are those that
lightseekorg/smg reads and its other servers send (crates/grpc_client/src/tokenizer_bundle.rs: flat names, SHA-256 over the
archive; grpc_servicer, build_tokenizer_zip).
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path

from text_generation_proto.gateway import common_pb2
from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_proto.model_files import MAX_TOKENIZER_BYTES, find_file, read_file
from text_generation_shard.engine import EngineError, EngineInfo
from text_generation_shard.json_object import JsonObject

BACKEND = "tensorrt-llm"
_PACKAGES = {"tensorrt-llm": "tensorrt_llm"}
"""Engines that are packages with a version of their own."""
CHUNK_BYTES = 64 * 1024
MAX_BYTES = 200 << 20
"""Largest archive that the gateway accepts."""
_NAMES = frozenset(
    (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "tiktoken.model",
        "chat_template.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
    )
)
_FILE_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest time of the zip format, so that the same files always make the same archive."""


class NoTokenizer(Exception):
    """The model has no tokenizer to send; the message is one line."""


def model_info(info: EngineInfo, folder: Path | None) -> pb.GetModelInfoResponse:
    """Describe the model: limits from the engine, sizes from config.json, 0 if unknown."""
    config = _decoder_config(folder)
    features = ["guided_decoding"] if info.grammar_kinds else []
    if folder is not None and (folder / "tokenizer.json").is_file():
        features.append("stop_strings")
    return pb.GetModelInfoResponse(
        model_id=info.model_id,
        max_input_len=info.max_sequence_length - 1,
        max_seq_len=info.max_sequence_length,
        max_batch_size=info.max_slots,
        vocab_size=info.vocab_size,
        hidden_size=_size(config, "hidden_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=_size(config, "num_attention_heads"),
        supported_features=features,
    )


def server_info(info: EngineInfo, gpus: int) -> pb.GetServerInfoResponse:
    """Describe the server: one replica on so many GPUs."""
    return pb.GetServerInfoResponse(
        version=_version(info.engine),
        backend=BACKEND,
        tensor_parallel_size=gpus // info.pipeline_parallel // info.context_parallel,
        pipeline_parallel_size=info.pipeline_parallel,
        context_parallel_size=info.context_parallel,
        world_size=gpus,
    )


def build_archive(folder: Path | None) -> bytes:
    """Return the archive of the tokenizer's files. Takes a second for a large tokenizer. Raises NoTokenizer."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise NoTokenizer("the model folder has no tokenizer.json")
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.iterdir() if path.name in _NAMES and path.is_file()):
            entry = zipfile.ZipInfo(path.name, _FILE_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, _read(folder, path.name))
    if len(data := buffer.getvalue()) > MAX_BYTES:
        raise NoTokenizer(f"the tokenizer's files take {len(data)} bytes, more than a gateway accepts")
    return data


def _read(folder: Path, name: str) -> bytes:
    try:
        return read_file(find_file(folder, name), MAX_TOKENIZER_BYTES)
    except (OSError, ValueError) as error:
        raise NoTokenizer(f"the tokenizer cannot be sent: {error}") from None


def archive_chunks(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yield the archive in chunks. The last one has its SHA-256."""
    for start in range(0, len(archive), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        digest = hashlib.sha256(archive).hexdigest() if end >= len(archive) else ""
        yield common_pb2.GetTokenizerChunk(data=archive[start:end], sha256=digest)


def _version(engine: str) -> str:
    try:
        return version(_PACKAGES.get(engine, "text-generation-trtllm"))
    except PackageNotFoundError:  # importable but not installed
        return version("text-generation-trtllm")


def _decoder_config(folder: Path | None) -> Mapping[str, object]:
    """Return the part of config.json that describes the decoder; empty if there is none."""
    try:
        if folder is None:
            return {}
        config = JsonObject.read(folder)
        # Compiled engines keep it one level down.
        return (config.inner("pretrained_config") if "pretrained_config" in config else config.decoder()).values
    except (OSError, EngineError):
        return {}


def _size(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else 0
