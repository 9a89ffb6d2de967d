"""The tokenizer's files in one zip archive, for a gateway that has no copy of the model folder.

Which files, and how they travel, is what lightseekorg/smg reads and its other engines' servers send
(crates/grpc_client/src/tokenizer_bundle.rs: flat names, SHA-256 over the archive; grpc_servicer, build_tokenizer_zip).
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from text_generation_proto.gateway import common_pb2 as pb

CHUNK_BYTES = 64 * 1024
MAX_BYTES = 200 << 20
"""The gateway takes no larger archive."""
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
_BEGINNING = (1980, 1, 1, 0, 0, 0)
"""A zip archive's earliest time: the same files make the same archive, whenever they were written."""


class NoTokenizer(Exception):
    """There is nothing to send."""


def build_bundle(folder: Path | None) -> bytes:
    """The archive. Takes a second for a large tokenizer. Raises NoTokenizer."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise NoTokenizer("the model folder has no tokenizer.json")
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.iterdir() if path.name in _NAMES and path.is_file()):
            entry = zipfile.ZipInfo(path.name, _BEGINNING)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    if len(data := buffer.getvalue()) > MAX_BYTES:
        raise NoTokenizer(f"the tokenizer's files take {len(data)} bytes, more than a gateway accepts")
    return data


def chunks(bundle: bytes) -> Iterator[pb.GetTokenizerChunk]:
    """The archive in pieces; the last carries its SHA-256."""
    for start in range(0, len(bundle), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        digest = hashlib.sha256(bundle).hexdigest() if end >= len(bundle) else ""
        yield pb.GetTokenizerChunk(data=bundle[start:end], sha256=digest)
