"""The scanner accepts exactly the texts that the standard library's JSON parser accepts."""

from __future__ import annotations

import json

import pytest

from text_generation_router.chat.parsers.readers import MAX_DEPTH, ObjectScanner


def fits(text: str) -> bool:
    scanner = ObjectScanner()
    try:
        for char in text:
            scanner.push(char)
    except ValueError:
        return False
    return scanner.closed


VALUES = [
    "0", "-0", "10", "1.5", "-1.25e+10", "1E5", "1e-2", "01", "1.", ".5", "-", "-a", "1e", "1e+", "+1", "1.e5", "0x1",
    "00", "1.2.3", "true", "tru", "truee", "null", "nul", "false", "NULL", "[]", "[1]", "[1,]", "[,1]", "[1", "{}",
    '{"a":1}', '{"a"}', '{"a":}', '{"a":1,}', "{,}", "{1:2}", '{"a":1]}', "[}", '""', '"a"', '"\\n"', '"\\x"',
    '"\\u00e9"', '"\\u00g9"', '"\\u12"', '"\\u123"', '"\\u123g"', '"a', "1a", '[1,2,[3,{"b":[]}]]', '"\\""', '"\\\\"', "1,2", "'a'", "[1]2",
    "{}{}",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_a_value_fits_if_it_is_json(value: str) -> None:
    text = '{ "k" : ' + value + "\n}"
    try:
        json.loads(text, strict=False)
        valid = True
    except ValueError:
        valid = False
    assert fits(text) is valid


def test_nesting_has_a_limit() -> None:
    def nested(depth: int) -> str:
        return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)

    assert fits(nested(MAX_DEPTH))
    assert not fits(nested(MAX_DEPTH + 1))
