"""Objects and arrays of a JSON text are limited, and brackets in its strings do not count."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from text_generation_router.web.body_errors import InvalidJson
from text_generation_router.web.structure import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, JsonTexts, load

TRICKY = st.text(alphabet='[]{}"\\,:n/u0 é', max_size=12)


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@given(st.lists(st.one_of(TRICKY, st.dictionaries(TRICKY, TRICKY, max_size=2)), max_size=6))
@example(['"', "[", "\\", '\\"[', ""])
def test_brackets_in_strings_do_not_count(values: list[object]) -> None:
    text = json.dumps([*values, "[" * 200]).encode()
    load(text)
    containers = 1 + sum(isinstance(value, dict) for value in values)
    some = b"[]," * (MAX_CONTAINERS - containers)
    load(b"[" + some + text[1:])
    with pytest.raises(InvalidJson, match="more than 32768 objects and arrays"):
        load(b"[[]," + some + text[1:])


def test_an_escape_may_be_anywhere_in_a_long_text() -> None:
    """A text is searched in parts of 256 KiB."""
    for before in range((1 << 18) - 8, 1 << 18):
        load(b'["' + b"a" * before + rb"\\\"" + b"[" * (MAX_CONTAINERS + 1) + b'"]')


def test_values_are_counted_in_a_body_of_any_length() -> None:
    """Strings of all lengths, longer ones than are searched at once, begin and end anywhere."""
    texts = [("[,\\" + '"' * (number % 3)) * (number * 20) for number in range(200)]
    long = json.dumps(texts).encode()
    values = len(texts)  # the first entry of a list has no comma before it
    assert len(long) > 1 << 20
    most = b",1" * (MAX_VALUES - values)
    load(long[:-1] + most + b"]")
    with pytest.raises(InvalidJson, match="more than 1048576 values"):
        load(long[:-1] + most + b",1]")
    with pytest.raises(InvalidJson, match="more than 1048576 values"):
        load(b"[" + b"[]," * (MAX_VALUES // 2) + b"1" + b",1" * MAX_VALUES + b"]")


def test_depth_is_limited() -> None:
    load(b"[" + b"[]," * 500 + deep(MAX_DEPTH - 1) + b"]")
    with pytest.raises(InvalidJson, match="nested more than 128 levels deep"):
        load(deep(MAX_DEPTH + 1))
    for broken in (b"]" * 1000, b"[" * 1000, b'"' * 1000 + b"{" * 1000):  # the parser names the fault
        with pytest.raises((InvalidJson, orjson.JSONDecodeError)):
            load(broken)


@pytest.mark.parametrize(
    "before", [b"[", b'{"a":{},"b":[' + b"{}," * MAX_DEPTH, b"[" + b"[]," * (MAX_CONTAINERS - MAX_DEPTH - 1)]
)
def test_depth_is_limited_behind_other_values(before: bytes) -> None:
    after = b"]}" if before[:1] == b"{" else b"]"
    levels = MAX_DEPTH - len(after)
    load(before + deep(levels) + after)
    load(before + b'"' + b"[" * (MAX_CONTAINERS + 1) + b'"' + after)
    for text in (before + deep(levels + 1) + after, before + deep(2000) + after, before + deep(levels + 1)):
        with pytest.raises(InvalidJson, match=r"nested more than 128 levels deep|more than 32768 objects and arrays"):
            load(text)


def test_texts_inside_of_a_body_share_its_limits() -> None:
    texts = JsonTexts()
    half = "[" + "{}," * (MAX_CONTAINERS // 2 - 2) + "{}]"
    assert len(texts.read(half)) == MAX_CONTAINERS // 2 - 1
    with pytest.raises(ValueError, match="more than 32768 objects and arrays"):
        texts.read(half[:-1] + ",[]" * (MAX_CONTAINERS // 2) + "]")
    assert texts.read(half), "a refused text does not count"
    with pytest.raises(ValueError, match="more than 32768 objects and arrays"):
        texts.read('{"a":1}')
    with pytest.raises(ValueError, match="more than 1048576 values"):
        texts.read("[0" + ",0" * MAX_VALUES + "]")
    with pytest.raises(ValueError, match="nested more than 128 levels deep"):
        JsonTexts().read(deep(MAX_DEPTH + 1).decode())
    with pytest.raises(ValueError, match="unexpected end"):
        JsonTexts().read("{")
