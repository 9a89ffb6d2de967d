"""What TGI's routes say, to the byte: key order, omissions, 32-bit log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from text_generation_router.api.core.serving import Collector
from text_generation_router.api.http.record import GenerationRecord
from text_generation_router.api.http.sse import EventStream
from text_generation_router.api.tgi.schemas import GenerateBody
from text_generation_router.errors import ServingError
from text_generation_router.generation import Ending, Piece
from text_generation_router.request import LogprobJson, Request, TopToken
from text_generation_router.text.tokenizer import Tokenizer

Json = dict[str, Any]


class TokenEvents:
    """A sink that streams: one event a token."""

    def __init__(
        self, stream: EventStream, body: GenerateBody, tokenizer: Tokenizer, generation: GenerationRecord
    ) -> None:
        self._stream = stream
        self._send = stream.send
        self._body = body
        self._tokenizer = tokenizer
        self._generation = generation
        self._index = 0

    def on_piece(self, piece: Piece) -> None:
        # The hot path of the whole API: formatted by hand, and only the text is escaped.
        token_id, text, _, logprob, special, top, ending = piece
        self._index += 1
        if ending is None and not top:
            self._send(
                b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},'
                b'"generated_text":null,"details":null}\n\n'
                % (self._index, token_id, orjson.dumps(text), logprob, b"true" if special else b"false")
            )
            return
        event: Json = {"index": self._index, "token": token_json(piece)}
        if top:
            event["top_tokens"] = top_tokens_json(top, self._tokenizer)
        event["generated_text"] = None if ending is None else generated_text(ending, self._body)
        event["details"] = self._details(ending) if ending is not None and self._body.parameters.details else None
        self._send(b"data: %b\n\n" % orjson.dumps(event))
        if ending is not None:
            self._generation.ending = ending
            self._stream.close()

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Sequence[Sequence[TopToken]]) -> None:
        raise AssertionError("prompt details are refused for streams")

    def on_failure(self, error: ServingError) -> None:
        self._generation.failed(error)
        self._stream.fail(error)

    def _details(self, ending: Ending) -> Json:
        request = self._generation.request
        assert request is not None
        details: Json = {
            "finish_reason": ending.reason.value,
            "generated_tokens": ending.generated_tokens,
            "seed": reported_seed(request),
            "input_length": len(request.prompt),
        }
        return details | _cached(self._generation.cached_tokens)


def whole_reply(
    body: GenerateBody, best: Collector, others: Sequence[Collector], tokenizer: Tokenizer, cached_tokens: int
) -> Json:
    """The answer of /generate."""
    reply: Json = {"generated_text": generated_text(best.ended.result(), body)}
    if body.parameters.details or body.parameters.decoder_input_details:
        details = _sequence(best, tokenizer)
        top_tokens = details.pop("top_tokens", None)
        if others:
            details["best_of_sequences"] = [
                {"generated_text": generated_text(other.ended.result(), body), **_sequence(other, tokenizer)}
                for other in others
            ]
        if top_tokens is not None:
            details["top_tokens"] = top_tokens
        reply["details"] = details | _cached(cached_tokens)
    return reply


def _cached(tokens: int) -> Json:
    """TGI has no such field, so it is there only where it says something."""
    return {"cached_tokens": tokens} if tokens else {}


def generated_text(ending: Ending, body: GenerateBody) -> str:
    """The text of a finished request, after its prompt where that was asked for."""
    return body.inputs + ending.text if body.parameters.return_full_text else ending.text


def reported_seed(request: Request) -> int | None:
    """The seed, where one was used."""
    return None if request.sampling.greedy else request.sampling.seed


def token_json(piece: Piece) -> Json:
    """One generated token."""
    return {
        "id": piece.token_id,
        "text": piece.text,
        "logprob": orjson.Fragment(piece.logprob),
        "special": piece.special,
    }


def top_tokens_json(top: Iterable[TopToken], tokenizer: Tokenizer) -> list[Json]:
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


def _sequence(collected: Collector, tokenizer: Tokenizer) -> Json:
    ending = collected.ended.result()
    sequence: Json = {
        "finish_reason": ending.reason.value,
        "generated_tokens": ending.generated_tokens,
        "seed": reported_seed(collected.request),
        "prefill": [
            {"id": token_id, "text": tokenizer.token_text(token_id), "logprob": orjson.Fragment(logprob)}
            for token_id, logprob in zip(collected.request.prompt, collected.prompt_logprobs, strict=False)
        ],
        "tokens": [token_json(piece) for piece in collected.pieces],
    }
    if collected.request.logprobs.top_n:
        sequence["top_tokens"] = [top_tokens_json(piece.top, tokenizer) for piece in collected.pieces]
    return sequence
