"""What router and worker say to each other: frames over one socket, which is the worker's standard input and output.

A frame is the length of its body (4 bytes, big-endian), its kind (1 byte) and its body. The router begins with the
settings as JSON; each later frame of its is a job. The worker answers each with one frame, and says nothing unasked.
"""

from __future__ import annotations

import struct
from enum import IntEnum

HEADER = struct.Struct(">IB")
MAX_MESSAGE = 1000
"""Characters of an error's message that are passed on."""


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 0
    RESULT = 1
    FAILED = 2
    """The body is the error's message, one line."""
    OUT_OF_MEMORY = 3
    """The worker ends after it."""


def pack(kind: Kind, body: bytes) -> bytes:
    """One frame."""
    return HEADER.pack(len(body), kind) + body


def one_line(error: BaseException) -> str:
    """An error's message as one line of bounded length; its type's name where it has none."""
    message = " ".join(str(error)[: 2 * MAX_MESSAGE].split()) or type(error).__name__
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"
