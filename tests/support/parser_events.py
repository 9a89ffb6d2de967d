"""The events of an output parser as the parts of an answer: texts, thoughts and calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from text_generation_router.chat.events import Kind, OutputParser


class Thought(NamedTuple):
    """Reasoning."""

    text: str


class Call(NamedTuple):
    """A tool call."""

    name: str
    arguments: str


Part = str | Thought | Call


def read_parts(parser: OutputParser, pieces: Iterable[str]) -> list[Part]:
    """Feed `pieces` and return the parts of the answer; adjacent events of a kind are joined."""
    parts: list[Part] = []
    calls = 0
    for kind, text, index in (*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()):
        last = parts[-1] if parts else None
        assert text
        match kind:
            case Kind.CALL:
                assert index == calls
                calls += 1
                parts.append(Call(text, ""))
            case Kind.ARGUMENTS:
                assert isinstance(last, Call)
                assert index == calls - 1
                parts[-1] = Call(last.name, last.arguments + text)
            case Kind.TEXT:
                parts[-1:] = [last + text] if isinstance(last, str) else [*parts[-1:], text]
            case Kind.REASONING:
                parts[-1:] = [Thought(last.text + text)] if isinstance(last, Thought) else [*parts[-1:], Thought(text)]
    return parts
