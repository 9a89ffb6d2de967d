"""TGI's responses: their types, and their writers, exact to the byte: key order, omissions, 32-bit log-probabilities."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired, TypeVar, cast

import orjson
from typing_extensions import TypeAliasType

from text_generation_router.api.core.serving import Collector, paced
from text_generation_router.api.http.fields import WrittenLogprob
from text_generation_router.api.http.record import GenerationRecord
from text_generation_router.api.tgi.schemas import GenerateBody
from text_generation_router.errors import ServingError
from text_generation_router.generation import GenerationResult, Sink, TokenOutput
from text_generation_router.request import LogprobJson, Request, TokenId, TopToken
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.web.bodies import ResponseBody, compact_json
from text_generation_router.web.sse import EventStream

T = TypeVar("T")


class TokenAnswer(ResponseBody):
    """A generated token."""

    id: int
    text: str
    logprob: WrittenLogprob
    """Null if unknown, or if the token was impossible."""
    special: bool


class PrefillToken(ResponseBody):
    """A token of the prompt."""

    id: int
    text: str
    logprob: WrittenLogprob
    """Null for the first token, and if the engine does not know it."""


TgiFinishReason = TypeAliasType("TgiFinishReason", Literal["length", "eos_token", "stop_sequence"])


class Ended(ResponseBody):
    """The end of a sequence."""

    finish_reason: TgiFinishReason
    generated_tokens: int
    seed: int | None


class TokenDetails(Ended):
    """The end of a sequence and its tokens."""

    prefill: list[PrefillToken]
    tokens: list[TokenAnswer]
    top_tokens: NotRequired[list[list[TokenAnswer]]]


class BestOfSequence(TokenDetails):
    """One of the sequences of `best_of` that were not chosen."""

    generated_text: str


class Details(TokenDetails):
    """Details of a generated text."""

    best_of_sequences: NotRequired[list[BestOfSequence]]
    cached_tokens: NotRequired[int]
    """Prompt tokens found in the prefix cache; absent if none. Not part of TGI."""


class GenerateAnswer(ResponseBody):
    """A generated text."""

    generated_text: str
    details: NotRequired[Details]


class StreamDetails(Ended):
    """Details of a streamed text."""

    input_length: int
    cached_tokens: NotRequired[int]
    """Prompt tokens found in the prefix cache; absent if none. Not part of TGI."""


class StreamEvent(ResponseBody):
    """One token of a streamed text. The last event has the text and, if requested, details."""

    index: int
    token: TokenAnswer
    top_tokens: NotRequired[list[TokenAnswer]]
    generated_text: str | None
    details: StreamDetails | None


@dataclass(slots=True, eq=False)
class TokenEvents(Sink):
    """The sink of a streamed text: one event per token."""

    stream: EventStream
    body: GenerateBody
    tokenizer: Tokenizer
    generation: GenerationRecord

    def on_text(self, number: int, token_id: TokenId, text: str, logprob: LogprobJson) -> None:
        # The hot path of the API: a StreamEvent formatted by hand, in which only the text is escaped.
        self.stream.send(
            b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":false},'
            b'"generated_text":null,"details":null}\n\n' % (number, token_id, orjson.dumps(text), logprob)
        )

    def on_output(self, output: TokenOutput) -> None:
        ending = output.ending
        generated = None if ending is None else _generated_text(ending, self.body)
        details = self._details(ending) if ending is not None and self.body.parameters.details else None
        event: StreamEvent
        if output.top:
            event = {
                "index": output.number,
                "token": _token(output),
                "top_tokens": _top_tokens(output.top, self.tokenizer),
                "generated_text": generated,
                "details": details,
            }
        else:
            event = {"index": output.number, "token": _token(output), "generated_text": generated, "details": details}
        self.stream.send(b"data: %b\n\n" % orjson.dumps(event))
        if ending is not None:
            self.generation.ending = ending
            self.stream.close()

    def on_failure(self, error: ServingError) -> None:
        self.generation.failed(error)
        self.stream.fail(error)

    def _details(self, ending: GenerationResult) -> StreamDetails:
        request = self.generation.request
        assert request is not None
        details = cast("StreamDetails", {**_ended(ending, request), "input_length": len(request.prompt)})
        if cached := self.generation.cached_tokens:
            details["cached_tokens"] = cached
        return details


async def whole_reply(
    body: GenerateBody, best: Collector, others: Sequence[Collector], tokenizer: Tokenizer, cached_tokens: int
) -> GenerateAnswer:
    """The response of /generate. Its tokens are written: as objects they take five times as much."""
    reply: GenerateAnswer = {"generated_text": _generated_text(best.ended.result(), body)}
    if body.parameters.details or body.parameters.decoder_input_details:
        sequence, top_tokens = await _details(best, tokenizer)
        details = cast("Details", sequence)
        if others:
            details["best_of_sequences"] = [_written(await _other(other, body, tokenizer)) for other in others]
        if best.request.logprobs.top_n:
            details["top_tokens"] = top_tokens
        if cached_tokens:
            details["cached_tokens"] = cached_tokens
        reply["details"] = details
    return reply


def _generated_text(ending: GenerationResult, body: GenerateBody) -> str:
    """The text of a finished generation, after its prompt if requested."""
    return body.inputs + ending.text if body.parameters.return_full_text else ending.text


def _ended(ending: GenerationResult, request: Request) -> Ended:
    """The end of a sequence; its seed, if the request was sampled."""
    seed = None if request.sampling.greedy else request.sampling.seed
    return {"finish_reason": ending.reason.value, "generated_tokens": ending.generated_tokens, "seed": seed}


def _token(output: TokenOutput) -> TokenAnswer:
    return {
        "id": output.token_id,
        "text": output.text,
        "logprob": orjson.Fragment(output.logprob),
        "special": output.special,
    }


def _top_tokens(top: Iterable[TopToken], tokenizer: Tokenizer) -> list[TokenAnswer]:
    """The most probable tokens of one position."""
    return [
        {
            "id": token_id,
            "text": tokenizer.token_text(token_id),
            "logprob": orjson.Fragment(logprob),
            "special": token_id in tokenizer.special_texts,
        }
        for token_id, logprob in top
    ]


def _written(value: T) -> T:
    """Return a part of a response as its JSON, which takes the place of the part."""
    return cast("T", orjson.Fragment(compact_json(value)))


async def _details(collected: Collector, tokenizer: Tokenizer) -> tuple[TokenDetails, list[list[TokenAnswer]]]:
    """Details of one sequence, and the most probable tokens of each position."""
    prefill: list[PrefillToken] = []
    async for token_id, logprob in paced(zip(collected.request.prompt, collected.prompt_logprobs, strict=False)):
        text = tokenizer.token_text(token_id)
        token: PrefillToken = {"id": token_id, "text": text, "logprob": orjson.Fragment(logprob)}
        prefill.append(_written(token))
    tokens: list[TokenAnswer] = []
    top_tokens: list[list[TokenAnswer]] = []
    async for output in paced(collected.take_outputs()):
        tokens.append(_written(_token(output)))
        top_tokens.append(_written(_top_tokens(output.top, tokenizer)))
    ended = _ended(collected.ended.result(), collected.request)
    return cast("TokenDetails", {**ended, "prefill": prefill, "tokens": tokens}), top_tokens


async def _other(collected: Collector, body: GenerateBody, tokenizer: Tokenizer) -> BestOfSequence:
    """A sequence of `best_of` that was not chosen."""
    details, top_tokens = await _details(collected, tokenizer)
    text = _generated_text(collected.ended.result(), body)
    other: dict[str, object] = {"generated_text": text, **details}
    if collected.request.logprobs.top_n:
        other["top_tokens"] = top_tokens
    return cast("BestOfSequence", other)
