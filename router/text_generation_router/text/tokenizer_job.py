"""The job of a sandbox that encodes long texts and decodes many tokens: `tokenizer_job(config)` makes it.

The input is a byte of Flags, then a text in UTF-8, or token ids for DECODE. The result of an encoding is the ids; with
OFFSETS also the first character of each token, then the character after it. Numbers are 32-bit arrays.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from enum import IntFlag
from typing import Any

import tokenizers


class Flags(IntFlag):
    """The kind of a job."""

    SPECIAL = 1
    """Add the tokens that the tokenizer puts around a text."""
    OFFSETS = 2
    DECODE = 4


def tokenizer_job(config: dict[str, Any]) -> Callable[[], Callable[[bytes], bytes]]:
    """Return a function that returns the job; `config`: `tokenizer`, the path of a tokenizer.json."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text has nothing to share out
    tokenizer = configured(tokenizers.Tokenizer.from_file(config["tokenizer"]))

    def job(payload: bytes) -> bytes:
        flags, body = Flags(payload[0]), payload[1:]
        if flags & Flags.DECODE:
            return tokenizer.decode(array("I", body).tolist(), skip_special_tokens=False).encode()
        special = bool(flags & Flags.SPECIAL)
        if flags & Flags.OFFSETS:
            encoding = tokenizer.encode(body.decode(), add_special_tokens=special)
            offsets = encoding.offsets
            columns = (encoding.ids, [start for start, _ in offsets], [stop for _, stop in offsets])
            return b"".join(array("I", column).tobytes() for column in columns)
        [encoding] = tokenizer.encode_batch_fast([body.decode()], add_special_tokens=special)
        return array("I", encoding.ids).tobytes()

    return lambda: job


def configured(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return `tokenizer`, set to encode whole texts as TGI does."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Special tokens in a text are recognised, as in TGI: chat templates write them into prompts.
    tokenizer.encode_special_tokens = False
    return tokenizer
