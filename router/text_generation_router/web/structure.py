"""The limits of a JSON text. Values, objects and arrays are counted before it is parsed; their nesting is often seen on the value.

An object or array costs a hundred times its bytes when it is parsed, and a microsecond when it is validated. A number or a
short text costs twenty times its bytes.
"""

from itertools import accumulate, chain
from typing import Any

import orjson

from text_generation_router.web.body_errors import InvalidJson

MAX_CONTAINERS = 1 << 15
"""Objects and arrays of one body: a chat of 10,000 messages with a content part each."""
MAX_VALUES = 1 << 20
"""Values of one body: a prompt of as many token ids."""
MAX_DEPTH = 128
"""Levels of objects and arrays; the limit of serde_json, which TGI uses."""

_CHUNK = 1 << 18
"""Bytes that are searched at once, without giving up the interpreter's lock."""
_OTHER = bytes(set(range(256)) - set(b'"[]{},'))
_STEPS = [0] * 256
for _opening, _closing in (b"[]", b"{}"):
    _STEPS[_opening], _STEPS[_closing] = 1, -1


def load(text: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON text. Raises InvalidJson if it is beyond the limits, and orjson.JSONDecodeError.

    To search a text for brackets and commas outside of its strings takes longer than to parse it. So a text is only searched if it
    has too many of them, strings included, or if its value is large, and may nest too deep. If a key comes twice in an object, the
    first value is not kept, and may nest deeper.
    """
    containers = _count(text, b"[{")
    # A text has at most as many commas as bytes. To count them takes twice as long as to parse a chat.
    values = containers + _count(text, b",") if len(text) > MAX_VALUES else containers
    if containers > MAX_CONTAINERS or values > MAX_VALUES:
        _search(text)
        return orjson.loads(text)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:  # as by its own limit of nesting
        _search(text)
        raise
    if containers > MAX_DEPTH and _may_be_deep(value):
        _search(text)
    return value


def _count(text: bytes, characters: bytes) -> int:
    return sum(text.count(each, at, at + _CHUNK) for at in range(0, len(text), _CHUNK) for each in characters)


def _search(text: bytes) -> None:
    """Raise InvalidJson if a text is beyond the limits."""
    try:
        JsonTexts().check(text)
    except ValueError as error:
        raise InvalidJson(f"Failed to parse the request body as JSON: {error}") from None


def _may_be_deep(value: Any) -> bool:  # noqa: ANN401 - any JSON value
    """Return True if objects and arrays are nested more than MAX_DEPTH levels deep, or if there are many values to look at."""
    level: list[Any] = [[value]]
    values = 0
    for _ in range(MAX_DEPTH + 1):
        values += sum(map(len, level))
        if values > MAX_CONTAINERS:
            return True
        inner = chain.from_iterable(each.values() if type(each) is dict else each for each in level)
        if not (level := [each for each in inner if type(each) in (dict, list)]):
            return False
    return True


class JsonTexts:
    """The JSON texts inside of a body. Together they have the limits of a body, or a text would hide its objects from these."""

    def __init__(self) -> None:
        self._containers = self._values = 0

    def read(self, text: str) -> Any:  # noqa: ANN401 - any JSON value
        """Return the value of a text. Raises ValueError if it is not JSON, or beyond the limits; then it does not count."""
        raw = text.encode()
        self.check(raw)
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ValueError(error.msg) from None

    def check(self, text: bytes) -> None:
        """Count a text. Raises ValueError if it is beyond the limits."""
        structure = _structure(text)
        containers = structure.count(b"[") + structure.count(b"{")
        values = self._values + containers + structure.count(b",")
        containers += self._containers
        if values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        if containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} objects and arrays")
        if max(accumulate(map(_STEPS.__getitem__, structure.translate(None, b","))), default=0) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        self._containers, self._values = containers, values


def _structure(text: bytes) -> bytes:
    """Return the brackets and commas of a JSON text that are not inside of its strings, or too many of them."""
    found, in_string, at = bytearray(), False, 0
    while at < len(text):
        some = text[at : at + _CHUNK]
        if (len(some) - len(some.rstrip(b"\\"))) % 2:  # the next character is escaped
            some = text[at : at + _CHUNK + 1]
        at += len(some)
        quoted = some.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHER)
        # Most strings are now `""`. The end of one string and the start of the next may be, too: then the two become one,
        # with the same characters inside.
        parts = quoted.replace(b'""', b"").split(b'"')
        found += b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        if len(found) > 2 * MAX_VALUES:  # each value has a comma or two brackets
            break
    return bytes(found)
