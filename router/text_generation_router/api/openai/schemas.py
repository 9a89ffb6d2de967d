"""Request bodies of OpenAI's dialect: as lenient as its clients need. `null` is absence everywhere, unknown fields are ignored.

Fields of other servers (vLLM's `ignore_eos`, `min_tokens`, …) are accepted because benchmark and evaluation tools
send them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypeAliasType

from text_generation_proto.values import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from text_generation_router.api.http.caller import OpenFields
from text_generation_router.api.http.fields import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    WHOLE,
    Float32,
    Int32,
    Name,
    PromptTokenIds,
    StopText,
    StopTexts,
    TokenIds,
    UInt32,
    UInt64,
    at_most,
)
from text_generation_router.api.openai.shared_fields import UNSERVED, ConstraintFields
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.tools import MAX_TOOLS
from text_generation_router.web.bodies import Body

MAX_MESSAGES = MAX_PARTS = 10_000
"""Messages of a conversation; parts, or tool calls, of a message. More are an attack."""
MAX_CHOICES = 128
"""OpenAI's own limit of `n`."""
MAX_TEMPLATE_ARGUMENTS = 256
"""Keys of `chat_template_kwargs`."""
MAX_DOCUMENTS = 1024
"""Entries of `documents`."""
MAX_PROMPTS = 4096
"""Prompts that are read; `--max-client-batch-size` limits those that are used."""

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1), WHOLE]


TokenIdText = Annotated[str, Field(max_length=20)]
Biases = Annotated[dict[TokenIdText, float], BeforeValidator(at_most(MAX_LOGIT_BIAS, "tokens"))]
LogitBias = Biases | Annotated[list[float], Field(fail_fast=True)]
"""OpenAI's: token id, as text, → bias. TGI's clients send a list, which TGI ignores."""
PromptTexts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
PromptIds = Annotated[list[PromptTokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TemplateArguments = Annotated[dict[Name, Any], BeforeValidator(at_most(MAX_TEMPLATE_ARGUMENTS, "keys"))]


def _as_count(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return `logprobs` of a completion: some clients send that of a chat, true or false."""
    return {True: 1, False: None}[value] if isinstance(value, bool) else value


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    """Send the token counts in a last chunk."""
    continuous_usage_stats: bool | None = None
    """Add the counts so far to every chunk."""


class LoraRequest(Body):
    """The adapter of a request to trtllm-serve."""

    lora_name: Annotated[Name, Field(min_length=1)]
    """An adapter that is loaded, or is to be: see `lora_path`. Any other is rejected."""
    lora_int_id: Int64 | None = None
    """Accepted; not used."""
    lora_path: Annotated[str, Field(max_length=1024)] | None = None
    """Folder below --lora-modules-dir that a new name is loaded from, as by /v1/load_lora_adapter."""


class OpenAIBody(ConstraintFields, OpenFields):
    """Base of the bodies of chats and completions."""

    unserved = UNSERVED

    lora_request: SkipJsonSchema[LoraRequest | None] = None
    """trtllm-serve's: the adapter, beside the `model`."""
    stream_options: StreamOptions | None = None
    """Options of the stream."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    """The number of independent answers."""
    best_of: UInt64 | None = None
    """Must be 1 or equal `n`."""
    stop: StopText | StopTexts | None = None
    """Texts that end an answer; they are cut off."""
    seed: Seed | None = None
    """Seed of the sampling; random if absent."""
    frequency_penalty: Float32 | None = None
    """Penalises tokens by their count in the answer."""
    presence_penalty: Float32 | None = None
    """Penalises tokens that occur in the answer."""
    repetition_penalty: Float32 | None = None
    """TGI's: 1.0 means no penalty."""
    logit_bias: LogitBias | None = None
    """Added to the logits of these tokens."""
    top_k: Int32 | None = None
    """Keep the k most probable tokens; 0 or -1: all."""
    min_p: Float32 | None = None
    """Drop tokens less probable than this share of the most probable one's probability."""
    prompt_logprobs: UInt32 | None = None
    """vLLM's: report the log-probabilities of the prompt's tokens and of this number of most probable ones; not in streams."""
    ignore_eos: bool | None = None
    """Continue after the end-of-sequence token."""
    min_tokens: UInt32 | None = None
    """The fewest tokens to generate."""
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOPS)] | None = None
    """Tokens that end an answer."""
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    """vLLM's: the only tokens that are chosen. The end of the answer is a token too."""
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS // 2, fail_fast=True)] | None = None
    """vLLM's: texts that the answer does not contain."""
    include_stop_str_in_output: bool | None = None
    """vLLM's: keep the stop text at the end of the answer."""
    no_stop_trim: bool | None = None
    """SGLang's name of `include_stop_str_in_output`."""
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    """vLLM's: keep this number of tokens at the end of the prompt."""
    user: Name | None = None
    """The end user: without a session, the requests of one are charged together."""

    @property
    def named_job(self) -> str:
        return super().named_job or self.user or ""

    def check_best_of(self) -> None:
        """Raise InvalidRequest if there are to be more answers than are returned."""
        if self.best_of not in (None, 1, self.n or 1):
            raise InvalidRequest("`best_of` must be 1 or equal to `n`")

    @property
    def lora_path(self) -> str | None:
        return None if self.lora_request is None else self.lora_request.lora_path

    @property
    def lora_name(self) -> str | None:
        """The adapter that `lora_request` names."""
        return None if self.lora_request is None else self.lora_request.lora_name


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """The name of the function."""
    description: str | None = None
    """A description for the model."""
    parameters: dict[str, Any] | str | None = None
    """JSON schema of its arguments, or that schema as text."""
    arguments: dict[str, Any] | str | None = None
    """TGI's other name for `parameters`."""
    strict: bool | None = None
    """Calls must follow the schema. Forced calls always do; free calls if the model's call format has text markers."""


class ToolDefinition(Body):
    """A tool; only functions are supported."""

    type: Name = "function"
    """`function`."""
    function: FunctionDefinition
    """The function."""


class FunctionName(Body):
    """The name of a function."""

    name: Name
    """The name."""


class NamedToolChoice(Body):
    """The tool that must be called."""

    type: Name | None = None
    """`function`."""
    function: FunctionName
    """The function that must be called."""


FunctionCallMode = TypeAliasType("FunctionCallMode", Literal["auto", "none"])


class AllowedTools(Body):
    """The tools that the model may call, of those in the prompt."""

    mode: Literal["auto", "required"]
    """`required`: one of them must be called."""
    tools: Annotated[list[NamedToolChoice], Field(max_length=MAX_TOOLS, fail_fast=True)]
    """Their names. Names of other tools are ignored."""


class AllowedToolsChoice(Body):
    """The choice of a part of the tools."""

    type: Literal["allowed_tools"]
    """`allowed_tools`."""
    allowed_tools: AllowedTools
    """The part."""


class ImageUrl(Body):
    """The place of an image."""

    url: str
    """A `data:` URI, or a URL of a host that the operator allows."""
    detail: Name | None = None
    """Accepted; not used: the model has one."""


class ContentPart(Body):
    """A part of a message."""

    type: Name
    """`text`, `input_text`, `output_text` or `refusal`; `image_url` or `input_image` in messages of users and tools, if the model
    takes images; others are refused."""
    text: str | None = None
    """The text."""
    image_url: str | ImageUrl | None = None
    """The image."""
    detail: Name | None = None
    """Accepted; not used."""


ContentParts = Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class FunctionCall(Body):
    """The function and arguments of a tool call."""

    name: Name
    """The function."""
    arguments: str | dict[str, Any] | None = None
    """A JSON object, or its text."""


class ToolCall(Body):
    """A tool call of the assistant."""

    id: Name | Int64 | None = None
    """The id that the tool's message refers to."""
    type: Name | None = None
    """`function`."""
    function: FunctionCall
    """The call."""


class Message(Body):
    """One message of a conversation."""

    role: Name
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    content: str | ContentParts | None = None
    """The text, or its parts."""
    name: Name | None = None
    """The name of the author."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    """The tool calls of an assistant message."""
    function_call: FunctionCall | None = None
    """The older form of `tool_calls`, with one call."""
    tool_call_id: Name | None = None
    """The id of the call that a tool message answers."""
    reasoning_content: str | None = None
    """The reasoning of an assistant message."""


class TextPart(Body):
    """A part of a text."""

    type: Literal["text"]
    """`text`."""
    text: str
    """The text."""


class Prediction(Body):
    """The text that the client expects, most of it at least: an answer like it takes fewer steps. It changes no answer."""

    type: Literal["content"]
    """`content`."""
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
    """The text, or its parts."""

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(OpenAIBody):
    """Body of /v1/chat/completions and /chat_tokenize."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSERVED,
        **dict.fromkeys(("echo", "add_special_tokens"), (None, False)),
    }

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    """The conversation so far."""
    max_tokens: UInt32 | None = None
    """Tokens to generate; default: all that fit after the prompt."""
    max_completion_tokens: UInt32 | None = None
    """The newer name of `max_tokens`; wins over it."""
    logprobs: bool | None = None
    """Report the log-probabilities of the answer's tokens."""
    top_logprobs: UInt32 | None = None
    """Report also the log-probabilities of this number of most probable tokens at each position."""
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """The tools that the model may call."""
    tool_choice: Name | NamedToolChoice | AllowedToolsChoice | None = None
    """`auto`, `none` or `required`; a function's name, or an object with one, forces that function."""
    functions: Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """The older form of `tools`: the answer has one `function_call`."""
    function_call: FunctionCallMode | FunctionName | None = None
    """The older form of `tool_choice`, for `functions`."""
    tool_prompt: str | None = None
    """TGI's: the text that introduces the tools."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in one answer."""
    continue_final_message: bool | None = None
    """Continue the last message; default: true if it is the assistant's."""
    add_generation_prompt: bool | None = None
    """Have the template open the assistant's message."""
    chat_template_kwargs: TemplateArguments | None = None
    """Further variables of the chat template."""
    reasoning_effort: Name | None = None
    """A variable of the chat template."""
    verbosity: Name | None = None
    """A variable of the chat template."""
    prediction: Prediction | None = None
    """The text that is expected, such as a file before an edit, for speculative decoding."""
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    """vLLM's: a variable of the chat template."""


class CompletionBody(OpenAIBody):
    """Body of /v1/completions."""

    prompt: str | PromptTexts | PromptTokenIds | PromptIds
    """A text, several, or token ids."""
    max_tokens: UInt32 | None = None
    """Tokens to generate; default: all that fit after the prompt. 0 only with `echo`."""
    suffix: SkipJsonSchema[str | None] = None
    """Refused."""
    echo: bool | None = None
    """Repeat the prompt before the text."""
    logprobs: Annotated[UInt32 | None, BeforeValidator(_as_count)] = None
    """Report the log-probabilities of the tokens and of this number of most probable ones at each position; true: of one."""
    add_special_tokens: bool | None = None
    """Have the tokenizer add its special tokens, such as the first one; default: true."""


class ChatTokenizeBody(ChatBody):
    """Body of /chat_tokenize: that of /v1/chat/completions; only the fields that shape the prompt are used."""
