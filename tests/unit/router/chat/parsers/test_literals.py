"""Limits of the scanner for literals of Python and Gemma."""

from __future__ import annotations

import pytest

from text_generation_router.chat.parsers.literals import MAX_WORD, LiteralScanner


@pytest.mark.parametrize("mark", ['<|"|>', "<escape>"])
def test_a_mark_does_not_carry_a_word_past_its_limit(mark: str) -> None:
    written: list[str] = []
    scanner = LiteralScanner(written.append, mark)
    for char in "{a:" + "x" * (MAX_WORD - 2) + mark:
        scanner.push(char)
    with pytest.raises(ValueError, match="y"):
        scanner.push("y")
