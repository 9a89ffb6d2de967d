"""Responses in OpenAI's dialect: the types of chats and completions, and the parts that both write."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import zip_longest
from typing import Annotated, Literal, NotRequired, cast

import orjson
from pydantic import GetPydanticSchema
from typing_extensions import TypeAliasType

from text_generation_router.api.core.chat import Finish
from text_generation_router.api.core.ids import Named
from text_generation_router.api.core.serving import TOKENS_AT_ONCE, Collector
from text_generation_router.api.http.fields import WrittenLogprob, WrittenNumber
from text_generation_router.api.http.record import GenerationRecord, cached_tokens
from text_generation_router.generation import TokenOutput
from text_generation_router.request import LogprobJson, TokenId
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.web.bodies import ResponseBody, compact_json

IMPOSSIBLE = b"-9999.0"
"""OpenAI's log-probability of an impossible token: its clients expect a number."""


class PromptTokensDetails(ResponseBody):
    """Details of the prompt tokens."""

    cached_tokens: int
    """Tokens found in the prefix cache."""


class ReasoningDetails(ResponseBody):
    """The reasoning among the new tokens."""

    reasoning_tokens: int


class CompletionTokensDetails(ReasoningDetails):
    """Details of the new tokens."""

    accepted_prediction_tokens: NotRequired[int]
    """With `prediction`: tokens of it that speculative decoding brought to the answer."""
    rejected_prediction_tokens: NotRequired[int]
    """With `prediction`: tokens of it that were tried and are not in the answer. They are completion tokens, too."""


class Usage(ResponseBody):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    """In chats."""


class TokenLogprob(ResponseBody):
    """An alternative token."""

    token: str
    logprob: WrittenNumber
    bytes: list[int]


class ContentLogprob(ResponseBody):
    """A generated token and its alternatives."""

    token: str
    logprob: WrittenLogprob
    """Null if the engine does not know it."""
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


WrittenLogprobs = Annotated[orjson.Fragment, GetPydanticSchema(lambda _, schema_of: schema_of(list[ContentLogprob]))]
"""A list of them, already written as JSON."""


class ChatLogprobs(ResponseBody):
    """Log-probabilities of the tokens of a chat."""

    content: list[ContentLogprob]
    refusal: None


class CalledFunction(ResponseBody):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str


class CallAnswer(ResponseBody):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class PromptToken(ResponseBody):
    """A prompt token, or one of the most probable in its place."""

    logprob: WrittenLogprob
    rank: int | None
    """1 for the most probable; null if it is not among those that were asked for."""
    decoded_token: str


PromptScores = Annotated[
    orjson.Fragment, GetPydanticSchema(lambda _, schema_of: schema_of(list[dict[str, PromptToken] | None]))
]
"""For each prompt token null, or the token and the most probable ones by id, already written as JSON."""


class AssistantMessage(ResponseBody):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    """Null beside tool calls without text."""
    refusal: None
    reasoning_content: NotRequired[str]
    """The reasoning, with --split-reasoning."""
    tool_calls: NotRequired[list[CallAnswer]]
    function_call: NotRequired[CalledFunction]
    """In place of `tool_calls`, if the request has `functions`."""


ChatFinish = TypeAliasType("ChatFinish", Literal["stop", "length", "tool_calls", "function_call"])


def chat_finish(finish: Finish, *, functions: bool) -> ChatFinish:
    """Return the finish reason; `functions`: the request has `functions` in place of `tools`."""
    return "function_call" if functions and finish is Finish.TOOL_CALLS else finish.value


CompletionFinish = TypeAliasType("CompletionFinish", Literal["stop", "length"])


class ChatChoice(ResponseBody):
    """One of the choices of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class Headed(ResponseBody):
    """The fields that every response begins with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str


class ChatAnswer(Headed):
    """A complete chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptScores]
    """If requested."""


class FunctionDelta(ResponseBody):
    """The name of a called function, or more of its arguments."""

    name: NotRequired[str]
    arguments: str


class CallDelta(ResponseBody):
    """More of a tool call; id and type come with its name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(ResponseBody):
    """More of a message."""

    role: NotRequired[Literal["assistant"]]
    """In every chunk; for the stream helper of OpenAI's Python client, which joins the roles, only in the first."""
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]
    function_call: NotRequired[FunctionDelta]


class ChunkChoice(ResponseBody):
    """More of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChunk(Headed):
    """A chunk of a streamed chat. [DONE] follows the last one."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    """Empty in the chunk with the usage."""
    usage: Usage | None


class CompletionLogprobs(ResponseBody):
    """Columns over the tokens of a text."""

    tokens: list[str]
    token_logprobs: list[WrittenLogprob | None]
    top_logprobs: list[dict[str, WrittenLogprob] | None]
    text_offset: list[int]


class CompletionChoice(ResponseBody):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinish | None
    """Null in every chunk of a stream except the last."""
    prompt_logprobs: NotRequired[PromptScores]
    """If requested."""


class CompletionAnswer(Headed):
    """Complete texts in the order of their prompts, or a chunk of a stream; [DONE] follows the last chunk."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None


def chat_usage(
    prompt_tokens: int, generated: int, reasoning: int | None, records: Sequence[GenerationRecord], *, predicted: bool
) -> Usage:
    """Token counts of the answers to a chat; `predicted`: it has a prediction."""
    counts = usage(prompt_tokens, generated, cached_tokens(records), reasoning)
    if predicted:
        times = [each for record in records for each in record.sequences]
        accepted = sum(each.accepted_tokens for each in times)
        rejected = sum(each.predicted_tokens for each in times) - accepted
        counts["completion_tokens"] += rejected
        counts["total_tokens"] += rejected
        details = counts.setdefault("completion_tokens_details", {"reasoning_tokens": 0})
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = accepted, rejected
    return counts


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None) -> Usage:
    """Token counts of one or several choices; the prompt counts once for all choices."""
    counts: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts


def tokens_of(text: str, outputs: list[TokenOutput]) -> list[TokenOutput]:
    """Return the last of some tokens: those that `text` consists of."""
    first, left = len(outputs), len(text)
    while first and (left > 0 or not (outputs[first - 1].delta or outputs[first - 1].special)):  # or begins a character
        first -= 1
        left -= len(outputs[first].delta)
    return outputs[first:]


def content_logprobs(outputs: Iterable[TokenOutput], tokenizer: Tokenizer, tops: int) -> ChatLogprobs:
    """The `logprobs` of a choice, with at most `tops` alternatives; the engine gives more if some are equally probable.

    The token that ended the text is not part of its content.
    """
    content: list[ContentLogprob] = []
    for output in outputs:
        if not output.special:
            # Null is correct here: a generated token was possible, but the engine does not know how probable.
            chosen = _token(output.token_id, orjson.Fragment(output.logprob), tokenizer)
            alternatives = [_token(other, alternative(logprob), tokenizer) for other, logprob in output.top[:tops]]
            # Written: as objects they take five times as much.
            written = orjson.Fragment(compact_json({**chosen, "top_logprobs": alternatives}))
            content.append(cast("ContentLogprob", written))
    return {"content": content, "refusal": None}


def alternative(logprob: LogprobJson) -> orjson.Fragment:
    """The log-probability of a token that was not generated: always a number."""
    return orjson.Fragment(IMPOSSIBLE if logprob == b"null" else logprob)


async def whole_answer(
    named: Named,
    kind: str,
    choices: AsyncIterator[ChatChoice | CompletionChoice],
    usage: Usage,
    scores: orjson.Fragment | None = None,
) -> AsyncIterator[bytes]:
    """A ChatAnswer or CompletionAnswer as JSON, in parts. Each choice is made when the one before is written.

    `scores`: the log-probabilities of the prompt. Choices with log-probabilities are megabytes; other requests run between
    two of them.
    """
    before = named.head(kind) + b',"choices":['
    async for choice in choices:
        yield before + orjson.dumps(choice)
        before = b","
        await asyncio.sleep(0)
    end = {"usage": usage} if scores is None else {"usage": usage, "prompt_logprobs": scores}
    yield b"]," + orjson.dumps(end)[1:]


async def written_prompt_scores(collector: Collector, tokenizer: Tokenizer, tops_each: int) -> orjson.Fragment:
    """Return a list as JSON: for each prompt token null, or an object of it and the `tops_each` most probable tokens, by id."""
    written: list[bytes] = []
    scores = zip_longest(collector.request.prompt, collector.prompt_logprobs, collector.prompt_tops)
    for at, (token_id, logprob, tops) in enumerate(scores):
        if at % TOKENS_AT_ONCE == 0:
            await asyncio.sleep(0)
        if at == 0 or logprob in (None, b"null"):
            written.append(b"null")
            continue
        best = list(tops or ())[:tops_each]
        ranks = {top: rank for rank, (top, _) in enumerate(best, 1)}
        tokens: dict[str, PromptToken] = {}
        for top, value in ((token_id, orjson.Fragment(logprob)), *((top, alternative(value)) for top, value in best)):
            tokens.setdefault(
                str(top), {"logprob": value, "rank": ranks.get(top), "decoded_token": tokenizer.token_text(top)}
            )
        written.append(compact_json(tokens))
    return orjson.Fragment(b"[%b]" % b",".join(written))


def _token(token_id: TokenId, logprob: orjson.Fragment, tokenizer: Tokenizer) -> TokenLogprob:
    return {"token": tokenizer.token_text(token_id), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token_id))}
