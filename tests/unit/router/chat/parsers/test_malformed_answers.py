"""Answers that a model writes wrong: names that are too long, and runs of markers. Others: tests/property/test_output_parsers.py."""

from __future__ import annotations

import time

import pytest
from full_grid import full
from json_call_answers import TOOLS
from model_answers import TABLES
from parser_events import read_parts

from text_generation_router.chat.parsers import FORMATS, create_parser

LONG = 1_000_000
MOST_SECONDS = 1.2
"""Seconds of processor time for an answer of LONG characters, which takes at most one on a machine of 2026."""
NAME = next(iter(TOOLS))


def answers(name: str) -> list[str]:
    return [answer for kind, table in TABLES.items() if kind.partition("+")[0] == name for answer, _ in table.values()]


def test_a_name_too_long_is_text_up_to_its_limit_however_it_is_cut() -> None:
    call = f"<tool_call>{NAME}<arg_key>city</arg_key><arg_value>x</arg_value></tool_call>"
    for text in (f"<tool_call>{'a' * 300}{call}", f"<tool_call>{NAME}<arg_key>{'a' * 300}{call}</arg_key>"):
        whole = read_parts(create_parser("glm45", tools=TOOLS), [text])
        assert read_parts(create_parser("glm45", tools=TOOLS), text) == whole
        assert (NAME, '{"city": "x"}') in whole


@pytest.mark.parametrize("name", [name if name in ("glm45", "openai") else full(name) for name in FORMATS])
def test_the_time_grows_with_the_length(name: str) -> None:
    """Long runs of each marker: a parser that looked for the end of each would take many seconds."""
    for marker in (*sorted(create_parser(name, tools=TOOLS).markers), "<", " ", "{"):
        for start in ("", answers(name)[0][:-40]):
            text = start + marker * (LONG // len(marker))
            started = time.thread_time()
            parser = create_parser(name, tools=TOOLS)
            parser.feed(text)
            parser.finish()
            assert time.thread_time() - started < MOST_SECONDS, (start, marker)
