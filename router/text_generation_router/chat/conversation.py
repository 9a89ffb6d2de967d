"""The values of a chat request, in any dialect."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import Any

from text_generation_proto.values import Grammar

Json = dict[str, Any]

_BILLING = re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\n]*;)+[ \t]*(?:\n+|\Z)")


def without_billing(text: str) -> str:
    """Return a text of a system prompt without the billing header that Claude Code puts before it.

    The header is one line, `x-anthropic-billing-header: name=value; …`. Its values change with the request, so no prompt after
    it would be found in the prefix cache.
    """
    return _BILLING.sub("", text)


def image_part(source: str) -> Json:
    """Return the part of a content that is an image: a URL or a `data:` URI."""
    return {"type": "image", "image": source}


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def join_parts(parts: Sequence[str | Json], between: str = "") -> str | list[Json]:
    """Return a content: one text, or with images among `parts` a list, in which texts that follow each other are joined."""
    joined: list[Json] = []
    written = (text_part(part) if isinstance(part, str) else part for part in parts)
    for kind, group in groupby(written, itemgetter("type")):
        if kind == "text":
            joined.append(text_part(between.join(part["text"] for part in group)))
        else:
            joined += group
    if all(part["type"] == "text" for part in joined):
        return joined[0]["text"] if joined else ""
    return joined


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of an object; empty if none were given."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    """Calls must follow the schema also if the model may choose to make them."""


class ToolMode(Enum):
    """The freedom of the model to call tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The mode; with NAMED also the name of the tool that must be called."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None
    allowed: Collection[str] | None = None
    """With AUTO and REQUIRED: the names of the tools that may be called; None: of all."""
    field: str = "tool_choice"
    """The client's name of it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The part of a request that determines the prompt and the form of the answer."""

    messages: Sequence[Json]
    """Messages in the form of chat templates: role, content (text, parts with images, or None with tool_calls), tool_calls with
    `arguments` as an object, tool_call_id, name."""
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    tool_prompt: str | None = None
    """TGI's parameter: the text about the tools after the user's first message, for templates that do not know tools."""
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    """The grammar of `response_format`."""
    continue_final_message: bool | None = None
    """Continue the last message instead of starting a new one. None: if the last one is the assistant's, as in TGI."""
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the template (`enable_thinking`)."""

    @property
    def images(self) -> list[str]:
        """The sources of all images, in order."""
        contents = (message.get("content") for message in self.messages)
        return [
            part["image"]
            for parts in contents
            if isinstance(parts, list)
            for part in parts
            if part.get("type") == "image"
        ]
