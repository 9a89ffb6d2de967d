"""What Anthropic's routes answer, for the OpenAPI document. Tests hold the real answers against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from text_generation_router.api.document.answers import Answer


class MessageUsage(Answer):
    """Token counts."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    input_tokens: int
    """Tokens of the prompt that no cache was used for."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    """Tokens of the prompt that were found in the KV cache. The three of them are the whole prompt."""
    output_tokens: int


class MessageAnswer(Answer):
    """A whole message."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks of text, thinking and tool use."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Answer):
    """A named event of a streamed message; the last one is of type message_stop, or error."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    type: str


class TokenCount(Answer):
    """How long a prompt is."""

    input_tokens: int
