"""Answers of models in each format and their parts, whole and cut at every character."""

from __future__ import annotations

import pytest
from json_call_answers import TOOLS
from model_answers import TABLES
from parser_events import Part, read_parts

from text_generation_router.chat.events import OutputParser
from text_generation_router.chat.parsers import FORMATS
from text_generation_router.chat.parsers.reasoning import END_THINK, THINK, ReasoningParser


def new_parser(kind: str) -> OutputParser:
    name, _, reasoning = kind.partition("+")
    parser = FORMATS[name].parser(TOOLS)
    start, end = ("[THINK]", "[/THINK]") if name == "mistral" else (THINK, END_THINK)
    return ReasoningParser(parser, start=start, end=end, starts_inside=reasoning == "inside") if reasoning else parser


@pytest.mark.parametrize(
    ("kind", "answer", "parts"),
    [pytest.param(kind, *row, id=f"{kind}: {case}") for kind, table in TABLES.items() for case, row in table.items()],
)
def test_an_answer_is_read_whole_and_cut_at_every_character(kind: str, answer: str, parts: list[Part] | None) -> None:
    expected = [answer] * bool(answer) if parts is None else parts
    assert read_parts(new_parser(kind), [answer]) == expected
    assert read_parts(new_parser(kind), answer) == expected
    for cut in range(1, min(len(answer), 400)):
        assert read_parts(new_parser(kind), [answer[:cut], answer[cut:]]) == expected
