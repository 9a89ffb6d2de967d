"""Request bodies of OpenAI's Responses API. `null` is absence everywhere, unknown fields are ignored.

What only a server that stores something can do is described here to be refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field
from typing_extensions import TypeAliasType

from text_generation_router.api.core.quality_of_service import TieredFields
from text_generation_router.api.http.bodies import Body, Float32, TextMetadata, Texts, UInt32
from text_generation_router.api.openai.schemas import ContentPart

MAX_ITEMS = 10_000
"""Items of an input. None needs a field, so that half a million would be a good body; no model reads so many."""
MAX_PARTS = 10_000
"""Parts of one item."""

ItemParts = TypeAliasType("ItemParts", Annotated[list[ContentPart], FailFast(), Field(max_length=MAX_PARTS)])


class InputItem(Body):
    """One item of the input: a message, a call, what a call gave, a thought. Which fields count depends on its type."""

    type: str | None = None
    """`message` (also if absent), `function_call`, `function_call_output` or `reasoning`; others are refused."""
    id: str | None = None
    """Ignored: nothing is stored."""
    role: str | None = None
    """Of a message: `user`, `assistant`, `system` or `developer`."""
    content: str | ItemParts | None = None
    """The text of a message or of a reasoning."""
    call_id: str | None = None
    """Which call is made or answered."""
    name: str | None = None
    """The function that is called."""
    namespace: str | None = None
    """The namespace it was given in."""
    arguments: str | None = None
    """Of a call: a JSON object as text."""
    output: str | ItemParts | None = None
    """What a call gave."""
    summary: ItemParts | None = None
    """Of a reasoning; counts where it has no content."""


InputItems = TypeAliasType("InputItems", Annotated[list[InputItem], FailFast(), Field(max_length=MAX_ITEMS)])


class FunctionTool(Body):
    """A function the model may call."""

    model_config = ConfigDict(extra="allow")  # repeated in the answer

    type: str
    """`function`; tools that OpenAI would run are left out, other types refused."""
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Its name."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Accepted: forced calls always follow the schema."""


FunctionTools = TypeAliasType("FunctionTools", Annotated[list[FunctionTool], FailFast()])


class AnyTool(FunctionTool):
    """A function the model may call, or with the type `namespace` several that belong together."""

    tools: FunctionTools | None = None
    """Of a namespace: its functions."""


AnyTools = TypeAliasType("AnyTools", Annotated[list[AnyTool], FailFast()])


class NamedFunction(Body):
    """The function that must be called."""

    type: str
    """`function`; others are refused."""
    name: str | None = None
    """Which."""


class TextOptions(Body):
    """What the text must look like."""

    format: dict[str, Any] | None = None
    """`{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "name": …, "schema": …}`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted; not used."""


class ReasoningOptions(Body):
    """How the model thinks."""

    effort: str | None = None
    """A variable of the chat template."""
    summary: str | None = None
    """Accepted: the reasoning itself is told."""


class ResponsesBody(TieredFields):
    """Body of /v1/responses."""

    model: str | None = None
    """Name of the model; anything is served by the one model there is."""
    input: str | InputItems
    """The conversation so far; a text is the user's."""
    instructions: str | None = None
    """A system message before it."""
    max_output_tokens: UInt32 | None = None
    """Tokens to generate; default: all that fit after the prompt."""
    temperature: Float32 | None = None
    """0 takes the most probable token; default: 1."""
    top_p: Float32 | None = None
    """Keep the smallest set of most probable tokens whose probabilities reach this sum."""
    stream: bool | None = None
    """Answer as server-sent events."""
    tools: AnyTools | None = None
    """What the model may call."""
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    """Whether it must, and which."""
    parallel_tool_calls: bool | None = None
    """Whether several calls may be made at once."""
    text: TextOptions | None = None
    """What the text must look like."""
    reasoning: ReasoningOptions | None = None
    """How the model thinks."""
    metadata: TextMetadata | None = None
    """Repeated in the answer."""
    truncation: Literal["auto", "disabled"] | None = None
    """Accepted: a conversation that is too long is refused in any case."""
    store: bool | None = None
    """Accepted: nothing is stored, and the answer says so."""
    include: Texts | None = None
    """Accepted where it is about what is not here anyhow; log-probabilities are refused."""
    top_logprobs: UInt32 | None = None
    """Refused unless it is 0."""
    user: str | None = None
    """Repeated in the answer."""
    background: bool | None = None
    """True is refused: nothing is stored."""
    previous_response_id: str | None = None
    """Refused: nothing is stored."""
    conversation: str | dict[str, Any] | None = None
    """Refused: nothing is stored."""
    prompt: dict[str, Any] | None = None
    """Refused: nothing is stored."""
