"""Request bodies of Anthropic's Messages API. `null` is absence everywhere, unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field
from typing_extensions import TypeAliasType

from text_generation_router.api.core.quality_of_service import TieredFields
from text_generation_router.api.http.bodies import AnyMetadata, Body, Float32, Int32, Texts, UInt32

MAX_MESSAGES = 10_000
"""Of a conversation; no model reads so many."""
MAX_BLOCKS = 10_000
"""Of one message, system prompt or tool's result."""


class TextBlock(Body):
    """A part of a system prompt or of a tool's result."""

    type: str
    """`text`; others are refused."""
    text: str | None = None
    """The text."""


TextBlocks = TypeAliasType("TextBlocks", Annotated[list[TextBlock], FailFast(), Field(max_length=MAX_BLOCKS)])


class ContentBlock(Body):
    """A part of a message. Which fields count depends on its type."""

    type: str
    """`text`, `tool_use`, `tool_result`, `thinking` or `redacted_thinking`; others are refused."""
    text: str | None = None
    """The text."""
    thinking: str | None = None
    """What the assistant thought."""
    id: str | None = None
    """Of a tool's use: what its result refers to."""
    name: str | None = None
    """The tool that is used."""
    input: dict[str, Any] | None = None
    """With what."""
    tool_use_id: str | None = None
    """Of a tool's result: which use it answers."""
    content: str | TextBlocks | None = None
    """Of a tool's result: what it gave."""
    is_error: bool | None = None
    """Whether the tool failed; the model is told so."""


ContentBlocks = TypeAliasType("ContentBlocks", Annotated[list[ContentBlock], FailFast(), Field(max_length=MAX_BLOCKS)])


class InputMessage(Body):
    """One message of a conversation."""

    role: str
    """`user`, `assistant` or `system`."""
    content: str | ContentBlocks
    """The text, or its parts."""


class ClientTool(Body):
    """A tool the model may use."""

    type: str | None = None
    """`custom`; tools that a server would run are refused."""
    name: Annotated[str, Field(min_length=1, max_length=256)]
    """Its name."""
    description: str | None = None
    """What it does, for the model."""
    input_schema: dict[str, Any] | None = None
    """JSON schema of its input."""


ClientTools = TypeAliasType("ClientTools", Annotated[list[ClientTool], FailFast()])


class ToolUseChoice(Body):
    """Whether a tool must be used, and which."""

    type: str
    """`auto`, `any`, `tool` or `none`."""
    name: str | None = None
    """With `tool`: which."""
    disable_parallel_tool_use: bool | None = None
    """At most one use in an answer."""


class Thinking(Body):
    """Whether the model thinks before it answers."""

    type: str
    """`disabled` says no to the chat template (`enable_thinking`), any other word yes."""


class OutputConfig(Body):
    """What the answer must look like."""

    format: dict[str, Any] | None = None
    """`{"type": "json_schema", "schema": …}`."""
    effort: str | None = None
    """A variable of the chat template (`reasoning_effort`)."""


class CountTokensBody(Body):
    """Body of /v1/messages/count_tokens: what shapes a prompt."""

    model: str | None = None
    """Name of the model; anything is served by the one model there is."""
    messages: Annotated[list[InputMessage], FailFast(), Field(max_length=MAX_MESSAGES)]
    """The conversation so far. The answer continues a last message of the assistant's."""
    system: str | TextBlocks | None = None
    """A system message before it."""
    tools: ClientTools | None = None
    """What the model may use."""
    tool_choice: ToolUseChoice | None = None
    """Whether it must, and which."""
    thinking: Thinking | None = None
    """Whether the model thinks before it answers."""
    output_config: OutputConfig | None = None
    """What the answer must look like."""
    thread: Any = None
    """Refused: nothing is stored. Anthropic's client then sends whole conversations."""


class MessagesBody(CountTokensBody, TieredFields):
    """Body of /v1/messages."""

    max_tokens: UInt32
    """Tokens to generate."""
    stop_sequences: Texts | None = None
    """Texts that end an answer; they are cut off."""
    temperature: Float32 | None = None
    """0 takes the most probable token; default: 1."""
    top_p: Float32 | None = None
    """Keep the smallest set of most probable tokens whose probabilities reach this sum."""
    top_k: Int32 | None = None
    """Keep the k most probable tokens."""
    stream: bool | None = None
    """Answer as server-sent events."""
    metadata: AnyMetadata | None = None
    """Accepted; not used."""
