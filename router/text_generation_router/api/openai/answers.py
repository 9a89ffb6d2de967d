"""What OpenAI's routes answer, for the OpenAPI document. Tests hold the real answers against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from text_generation_router.api.document.answers import Answer


class PromptTokensDetails(Answer):
    """What the prompt's tokens are."""

    cached_tokens: int
    """Found in the KV cache, so that they were not computed."""


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(Answer):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Answer):
    """A token of the answer, and what else could have come in its place."""

    token: str
    logprob: float | None
    """Null where the engine does not know it."""
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[ContentLogprob]
    refusal: None


class CalledFunction(Answer):
    """A function, and the JSON object it is called with."""

    name: str
    arguments: str


class CallAnswer(Answer):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    """Null beside tool calls that have no text."""
    reasoning_content: str = ""
    """What it thought, with --split-reasoning."""
    tool_calls: list[CallAnswer] = Field(default=[])


ChatFinish = Literal["stop", "length", "tool_calls"]


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class Headed(Answer):
    """What every answer begins with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str


class ChatAnswer(Headed):
    """A whole chat answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Answer):
    """More of a call: its name comes first, its arguments in pieces."""

    name: str = ""
    arguments: str


class CallDelta(Answer):
    """More of a tool call; id and type come with its name."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class Delta(Answer):
    """More of an answer."""

    role: Literal["assistant"] = "assistant"
    """In the first chunk."""
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[CallDelta] = Field(default=[])


class ChunkChoice(Answer):
    """More of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChunk(Headed):
    """A part of a streamed chat. After the last one comes `[DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    """Empty in the chunk that has the usage."""
    usage: Usage | None


class CompletionLogprobs(Answer):
    """Columns over the tokens of a text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    """Null in all chunks of a stream but the last."""


class CompletionAnswer(Headed):
    """Whole completions, in the order of their prompts; or a part of a streamed one, after which comes `[DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None


class ResponseAnswer(Answer):
    """A response, as OpenAI's Responses API has it."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    """Messages, function calls and reasoning."""


class ResponseEvent(Answer):
    """A named event of a streamed response; the last one is of type response.completed, .incomplete or .failed."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    type: str
    sequence_number: int
