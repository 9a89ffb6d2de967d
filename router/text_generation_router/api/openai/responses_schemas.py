"""Request bodies of OpenAI's Responses API. `null` is absence everywhere, unknown fields are ignored.

Fields that need stored responses are defined here so that they can be refused by name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypeAliasType

from text_generation_router.api.http.caller import OpenFields
from text_generation_router.api.http.fields import Name, TextMetadata, UInt32
from text_generation_router.api.openai.schemas import ChatBody, ContentParts
from text_generation_router.api.openai.shared_fields import UNSERVED
from text_generation_router.grammar.tools import MAX_TOOLS
from text_generation_router.web.bodies import Body

MAX_ITEMS = 10_000
"""Items of an input. An item needs no field, so a body could hold half a million; no model reads that."""
MAX_INCLUDED = 64
"""Entries of `include`."""

ResponseStatus = TypeAliasType("ResponseStatus", Literal["completed", "incomplete", "failed", "in_progress"])
ItemStatus = TypeAliasType("ItemStatus", Literal["in_progress", "completed", "incomplete"])


class InputItem(Body):
    """One item of the input: a message, a call, its output, or reasoning. Its type decides which fields are read."""

    type: Name | None = None
    """`message` (also if absent), `function_call`, `function_call_output` or `reasoning`; others are refused."""
    id: Name | None = None
    """Ignored: nothing is stored."""
    role: Name | None = None
    """The role of a message: `user`, `assistant`, `system` or `developer`."""
    content: str | ContentParts | None = None
    """The text of a message or of a reasoning."""
    call_id: Name | None = None
    """The id of the call that is made or answered."""
    name: Name | None = None
    """The called function."""
    namespace: Name | None = None
    """The namespace of the called function."""
    arguments: str | None = None
    """The arguments of a call: a JSON object as text."""
    output: str | ContentParts | None = None
    """The output of a call."""
    summary: ContentParts | None = None
    """The summary of reasoning; used if it has no content."""


HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "custom", "file_search"),
    *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search"),
    *("web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
)
"""Types of tools that are left out. Unknown types are refused: they may be misspelled."""


class FunctionTool(Body):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")  # the answer repeats it

    type: Name
    """`function`; tools that OpenAI would run are left out, other types refused."""
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The name of the function."""
    description: str | None = None
    """A description for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Accepted: forced calls always follow the schema."""


class AnyTool(FunctionTool):
    """A function that the model may call, or a `namespace` of several."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """The functions of a namespace."""


class NamedFunction(Body):
    """The function that must be called."""

    type: Name
    """`function`; others are refused."""
    name: Name | None = None
    """The name of the function."""


class AllowedFunctions(Body):
    """The tools that the model may call, of those in the prompt."""

    type: Literal["allowed_tools"]
    """`allowed_tools`."""
    mode: Literal["auto", "required"]
    """`required`: one of them must be called."""
    tools: Annotated[list[NamedFunction], Field(max_length=MAX_TOOLS, fail_fast=True)]
    """Their names. Names of other tools, and tools without a name, are ignored."""


class TextOptions(Body):
    """Constraints on the text."""

    format: dict[str, Any] | None = None
    """`{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "name": …, "schema": …}`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted; not used."""


class ReasoningOptions(Body):
    """Options of the reasoning."""

    effort: Name | None = None
    """A variable of the chat template."""
    summary: Name | None = None
    """Accepted: the answer has the whole reasoning."""


class ResponsesBody(OpenFields):
    """Body of /v1/responses."""

    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(ChatBody.model_fields, "") | {
        "messages": "Use `input`",
        "max_tokens": "Use `max_output_tokens`",
        "max_completion_tokens": "Use `max_output_tokens`",
        "reasoning_effort": "Use `reasoning.effort`",
        "response_format": "Use `text.format`",
        "verbosity": "Use `text.verbosity`",
        "lora_request": "Use `model`",
        "echo": "",
    }
    unserved = UNSERVED

    stream_options: dict[str, Any] | None = None
    """Accepted; not used."""

    input: str | Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True)]
    """The conversation so far; a text is a user message."""
    instructions: str | None = None
    """A system message before the conversation."""
    max_output_tokens: UInt32 | None = None
    """Tokens to generate; default: all that fit after the prompt."""
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """The tools that the model may call."""
    tool_choice: Literal["auto", "none", "required"] | AllowedFunctions | NamedFunction | None = None
    """The model's freedom to call them, or some of them."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in one answer."""
    text: TextOptions | None = None
    """Constraints on the text."""
    reasoning: ReasoningOptions | None = None
    """Options of the reasoning."""
    metadata: TextMetadata | None = None
    """Repeated in the answer."""
    truncation: Literal["auto", "disabled"] | None = None
    """Accepted: a conversation that is too long is always refused."""
    store: bool | None = None
    """Accepted: nothing is stored, and the answer says so."""
    include: Annotated[list[Name], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = None
    """`message.output_text.logprobs` asks for the log-probabilities of the text; OpenAI's other words have no effect."""
    top_logprobs: UInt32 | None = None
    """Report the log-probabilities of the text, and those of this number of most probable tokens at each position."""
    user: Name | None = None
    """Repeated in the answer. Without a session, the requests of one user are charged together."""
    background: SkipJsonSchema[bool | None] = None
    """True is refused: nothing is stored."""
    previous_response_id: SkipJsonSchema[Name | None] = None
    """Refused: nothing is stored."""
    conversation: SkipJsonSchema[str | dict[str, Any] | None] = None
    """Refused: nothing is stored."""
    prompt: SkipJsonSchema[dict[str, Any] | None] = None
    """Refused: nothing is stored."""

    @property
    def named_job(self) -> str:
        return super().named_job or self.user or ""
