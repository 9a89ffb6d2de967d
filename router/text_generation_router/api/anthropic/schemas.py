"""Request bodies of Anthropic's Messages API. `null` is absence everywhere, unknown fields are ignored."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from text_generation_proto.parameters import Api
from text_generation_proto.values import LOGPROB_PARAMETERS, SAMPLING_PARAMETERS, STOPPING_PARAMETERS
from text_generation_router.api.http.caller import OpenFields
from text_generation_router.api.http.fields import AnyMetadata, Int32, ModelName, Name, StopTexts, UInt32
from text_generation_router.grammar.tools import MAX_TOOLS
from text_generation_router.web.bodies import Body

MAX_MESSAGES = 10_000
"""Messages of a conversation; no model reads more."""
MAX_BLOCKS = 10_000
"""Blocks of one message, system prompt or tool result."""


class ImageSource(Body):
    """The place of an image."""

    type: Name
    """`base64` or `url`; others are refused."""
    media_type: Name | None = None
    """Accepted; the content tells it."""
    data: str | None = None
    """The file in base64."""
    url: str | None = None
    """A `data:` URI, or a URL of a host that the operator allows."""


class TextBlock(Body):
    """A block of a system prompt or of a tool result."""

    type: Name
    """`text`; in tool results `image`, if the model takes images; others are refused."""
    text: str | None = None
    """The text."""
    source: ImageSource | None = None
    """The image."""


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]


class ContentBlock(Body):
    """A block of a message. Its type decides which fields are read."""

    type: Name
    """`text`, `tool_use`, `tool_result`, `thinking` or `redacted_thinking`; `image` in messages of users, if the model takes images;
    others are refused."""
    text: str | None = None
    """The text."""
    source: ImageSource | None = None
    """The image."""
    thinking: str | None = None
    """The reasoning of the assistant."""
    id: Name | None = None
    """The id of a tool use; its result refers to it."""
    name: Name | None = None
    """The tool of a tool use."""
    input: dict[str, Any] | None = None
    """The input of a tool use."""
    tool_use_id: Name | None = None
    """The id of the tool use that a tool result answers."""
    content: str | TextBlocks | None = None
    """The content of a tool result."""
    is_error: bool | None = None
    """True if the tool failed; the prompt says so."""


class InputMessage(Body):
    """One message of a conversation."""

    role: Name
    """`user`, `assistant` or `system`."""
    content: str | Annotated[list[ContentBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]
    """A text, or blocks."""


class ClientTool(Body):
    """A tool the model may use."""

    type: Name | None = None
    """`custom`; tools that a server would run are refused."""
    name: Annotated[str, Field(min_length=1, max_length=256)]
    """The name of the tool."""
    description: str | None = None
    """A description for the model."""
    input_schema: dict[str, Any] | None = None
    """The JSON schema of its input; required of the tools that are served."""
    strict: bool | None = None
    """The input must follow the schema, as in OpenAI's dialect."""


class ToolUseChoice(Body):
    """The model's freedom to use tools."""

    type: Name
    """`auto`, `any`, `none`, or `tool` with a name."""
    name: Name | None = None
    """With `tool`: the tool that must be used."""
    disable_parallel_tool_use: bool | None = None
    """Allow at most one tool use in an answer."""


class Thinking(Body):
    """Switches reasoning before the answer on or off."""

    type: Name
    """`disabled` sets `enable_thinking` of the chat template to false, `enabled` and `adaptive` to true."""


class OutputConfig(Body):
    """Constraints on the answer."""

    format: dict[str, Any] | None = None
    """`{"type": "json_schema", "schema": …}`."""
    effort: Name | None = None
    """A variable of the chat template (`reasoning_effort`)."""


_PARAMETERS = (*SAMPLING_PARAMETERS, *STOPPING_PARAMETERS, *LOGPROB_PARAMETERS)
_OPENAI = {
    *("best_of", "chat_template_kwargs", "function_call", "functions", "input", "instructions", "n", "prompt"),
    *(parameter.names[Api.CHAT] for parameter in _PARAMETERS if Api.CHAT in parameter.names),
}
"""Fields of OpenAI's bodies."""


class CountTokensBody(Body):
    """Body of /v1/messages/count_tokens: the fields that shape the prompt."""

    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(_OPENAI, "") | {
        "max_completion_tokens": "Use `max_tokens`",
        "container": "",
        "mcp_servers": "Call the tools of these servers yourself, and send them as `tools`",
        "reasoning_effort": "Use `output_config.effort`",
        "response_format": "Use `output_config.format`",
        "stop": "Use `stop_sequences`",
    }

    model: ModelName | None = None
    """The name of the model or of an adapter, as /v1/models lists it."""
    messages: Annotated[list[InputMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    """The conversation so far. The answer continues the last message if it is the assistant's."""
    system: str | TextBlocks | None = None
    """A system message before the conversation."""
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """The tools that the model may use."""
    tool_choice: ToolUseChoice | None = None
    """The model's freedom to use them."""
    thinking: Thinking | None = None
    """Reasoning before the answer."""
    output_config: OutputConfig | None = None
    """Constraints on the answer."""
    output_format: dict[str, Any] | None = None
    """The older name of `output_config.format`."""
    thread: SkipJsonSchema[Any] = None
    """Refused: nothing is stored. Anthropic's client then sends the whole conversation."""


class MessagesBody(CountTokensBody, OpenFields):
    """Body of /v1/messages."""

    max_tokens: UInt32
    """The most tokens to generate."""
    stop_sequences: StopTexts | None = None
    """Texts that end the answer; they are cut off."""
    top_k: Int32 | None = None
    """Keep the k most probable tokens."""
    metadata: AnyMetadata | None = None
    """`user_id`, a text: without a session, the requests of one user are charged together."""

    @property
    def named_job(self) -> str:
        user = (self.metadata or {}).get("user_id")
        return super().named_job or (user if isinstance(user, str) else "")
