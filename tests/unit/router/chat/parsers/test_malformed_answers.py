"""Answers that a model writes wrong: the parts do not depend on how the text is cut, and the time grows with its length."""

from __future__ import annotations

import random
import time

import pytest
from full_grid import full
from json_call_answers import TOOLS
from model_answers import TABLES
from parser_events import read_parts

from text_generation_router.chat.parsers import FORMATS, create_parser

NUM_CASES = 60
LONG = 1_000_000
MOST_SECONDS = 1.2
"""Seconds of processor time for an answer of LONG characters, which takes at most one on a machine of 2026."""
NAME = next(iter(TOOLS))
PIECES = (
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "'''",
        "\\",
        '\\"',
        "\\u12",
        "\\ud800",
        ",",
        ":",
        "=",
        "(",
        ")",
        "<",
        "|",
        ">",
        "</",
    ),
    *(
        "\n",
        " ",
        "\t",
        "\0",
        "ü",
        "\U0001f600",
        "```json",
        "```",
        "null",
        "nul",
        "NaN",
        "1e9999",
        NAME,
        "a" * 270,
        '{"a":' * 70,
    ),
    *('{"name": "', f'{{"name": "{NAME}", "arguments": {{}}}}', "<think>", "</think>", "<tool", "to=", "assistant"),
)


def answers(name: str) -> list[str]:
    return [answer for kind, table in TABLES.items() if kind.partition("+")[0] == name for answer, _ in table.values()]


def damaged(answer: str, pieces: tuple[str, ...], chance: random.Random) -> str:
    """Return the answer with some parts replaced, repeated or cut off."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(answer))
        end = start + chance.choice((0, 0, 1, 2, 5, 20))
        answer = answer[:start] + chance.choice(pieces) + answer[end:]
    if chance.random() < 0.2:
        answer = answer[: chance.randint(0, len(answer))]
    return answer * chance.choice((1, 1, 1, 2))


def cut(text: str, chance: random.Random) -> list[str]:
    places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 9))))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_answer_is_read_the_same_however_it_is_cut(name: str) -> None:
    chance = random.Random(name)
    markers = sorted(create_parser(name, tools=TOOLS).markers)
    for _ in range(NUM_CASES):
        text = damaged(chance.choice(answers(name)), (*PIECES, *markers * 5), chance)
        whole = read_parts(create_parser(name, tools=TOOLS), [text])
        assert read_parts(create_parser(name, tools=TOOLS), text) == whole, text
        assert read_parts(create_parser(name, tools=TOOLS), cut(text, chance)) == whole, text


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
