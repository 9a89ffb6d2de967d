"""Parsers of what models write, by name, and which of them a model's chat template asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from text_generation_router.chat.events import OutputParser
from text_generation_router.chat.parsers.hermes import START, HermesParser
from text_generation_router.chat.parsers.json_answer import JsonAnswerParser
from text_generation_router.chat.parsers.json_calls import JsonCallsParser
from text_generation_router.chat.parsers.llama3_json import TAG, Llama3JsonParser
from text_generation_router.chat.parsers.mistral import CALLS, MistralParser
from text_generation_router.chat.parsers.plain import PlainParser
from text_generation_router.chat.parsers.reasoning import THINK, ReasoningParser

__all__ = [
    "PARSERS",
    "ReasoningParser",
    "create_parser",
    "detect_format",
    "starts_in_reasoning",
]


def _plain(tool_names: Collection[str]) -> OutputParser:
    return PlainParser()


PARSERS: Final[dict[str, Callable[[Collection[str]], OutputParser]]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "json": JsonAnswerParser,
    "json_calls": JsonCallsParser,
    "plain": _plain,
}


def create_parser(name: str, *, tool_names: Collection[str]) -> OutputParser:
    """A new parser for one answer. Calls of other tools than `tool_names` are text. ValueError: no such format."""
    try:
        make = PARSERS[name]
    except KeyError:
        raise ValueError(f"unknown tool call format {name!r}; known are {', '.join(sorted(PARSERS))}") from None
    return make(tool_names)


def detect_format(template: str, special_tokens: Collection[str]) -> str:
    """The format in which a model with this chat template writes calls; `json` where the template does not say.

    A special token counts only where the template knows of tools: a model that was not told of them through its template
    is told in words to answer with JSON.
    """
    if START in template:
        return "hermes"
    for marker, name in ((CALLS, "mistral"), (TAG, "llama3_json")):
        if marker in template or (marker in special_tokens and "tools" in template):
            return name
    return "json"


def starts_in_reasoning(prompt: str, start: str = THINK) -> bool:
    """Whether a rendered prompt ends with the start marker, so that the answer begins in the reasoning."""
    return prompt.rstrip().endswith(start)
