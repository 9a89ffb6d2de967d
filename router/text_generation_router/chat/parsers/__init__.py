"""Parsers of model answers by format name, and the format that a chat template implies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from text_generation_router.chat.events import OutputParser
from text_generation_router.chat.parsers.formats import (
    HERMES_START,
    LLAMA_TAG,
    MISTRAL_CALLS,
    HermesParser,
    JsonAnswerParser,
    JsonCallsParser,
    Llama3JsonParser,
    MistralParser,
    PlainParser,
)
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
    """Return a new parser for one answer. Calls of tools that are not in `tool_names` are text.

    Raises ValueError for an unknown format.
    """
    try:
        make = PARSERS[name]
    except KeyError:
        raise ValueError(f"unknown tool call format {name!r}; known are {', '.join(sorted(PARSERS))}") from None
    return make(tool_names)


def detect_format(template: str, special_tokens: Collection[str]) -> str:
    """Return the format in which a model with this chat template writes calls; `json` if the template implies none.

    A special token counts only if the template reads `tools`: otherwise the prompt asks the model to answer with JSON.
    """
    if HERMES_START in template:
        return "hermes"
    for marker, name in ((MISTRAL_CALLS, "mistral"), (LLAMA_TAG, "llama3_json")):
        if marker in template or (marker in special_tokens and "tools" in template):
            return name
    return "json"


def starts_in_reasoning(prompt: str, start: str = THINK) -> bool:
    """True if a rendered prompt ends with the start marker: the answer starts in the reasoning."""
    return prompt.rstrip().endswith(start)
