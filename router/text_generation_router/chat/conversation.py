"""What a chat request asks for, whatever its dialect: values, no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from text_generation_proto.values import Grammar

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters` is a JSON schema of an object; empty: no parameters were given."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    """Calls must follow the schema also where the model is free to make them."""


class ToolMode(Enum):
    """How free the model is to call tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The mode, and with NAMED the one tool that must be called."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Everything that shapes the prompt and the form of the answer."""

    messages: Sequence[Json]
    """As chat templates expect them: role, content (text, or None beside tool_calls), tool_calls with `arguments` as an
    object, tool_call_id, name."""
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    tool_prompt: str | None = None
    """TGI's: what is said of the tools after the last message where the template cannot."""
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    """What `response_format` asks for."""
    continue_final_message: bool | None = None
    """Go on with the last message instead of starting a new one. None: where the last one is the assistant's, as in TGI."""
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template (`enable_thinking`)."""
