"""The limits of a JSON text that are checked before it is parsed: its objects and arrays, and how deep they are nested.

Each of them costs a hundred times its bytes when it is parsed, and a microsecond when it is validated. Numbers and texts are
cheap.
"""

from __future__ import annotations

from itertools import accumulate

from text_generation_router.api.http.body_errors import InvalidJson

MAX_CONTAINERS = 1 << 15
"""Objects and arrays of one body: a chat of 10,000 messages with a content part each."""
MAX_DEPTH = 128
"""Levels of objects and arrays; the limit of serde_json, which TGI uses."""

_NO_BRACKETS = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = [0] * 256
for _opening, _closing in (b"[]", b"{}"):
    _STEPS[_opening], _STEPS[_closing] = 1, -1


def check_structure(text: bytes | bytearray) -> None:
    """Raise InvalidJson if a JSON text has too many objects and arrays, or nests them too deep."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    brackets = _brackets(text)
    if brackets.count(b"[") + brackets.count(b"{") > MAX_CONTAINERS:
        raise InvalidJson(f"Failed to parse the request body as JSON: more than {MAX_CONTAINERS} objects and arrays")
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise InvalidJson(f"Failed to parse the request body as JSON: nested more than {MAX_DEPTH} levels deep")


def _brackets(text: bytes | bytearray) -> bytes:
    """Return the brackets of a JSON text that are not inside of its strings."""
    quoted = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_BRACKETS)
    # A string without brackets is now `""`. The end of one string and the start of the next may be, too: then the two
    # become one, with the same brackets inside.
    return b"".join(quoted.replace(b'""', b"").split(b'"')[::2])
