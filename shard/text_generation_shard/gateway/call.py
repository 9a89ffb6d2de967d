"""GatewayCall: one Generate call while it is answered, the output of each of its sequences, and the messages made of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_proto.values import FinishReason
from text_generation_shard.engine import NewSequence, PromptScores, TopTokens
from text_generation_shard.gateway.request import CallFailed, GatewayRequest
from text_generation_shard.gateway.stop_strings import GatewayTokenizer, StopStringFinder

_FINISH_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS_TOKEN: "stop", FinishReason.STOP_SEQUENCE: "stop"}
CANCELLED = "cancelled"


class SequenceOutput:
    """The output of one sequence of a call. Ignores everything after its end."""

    def __init__(
        self,
        index: int,
        sequence: NewSequence,
        on_change: Callable[[], None],
        *,
        finder: StopStringFinder | None,
        keep_stop: bool,
    ) -> None:
        """`on_change` is called after each change. With `keep_stop` a stop token is part of the output."""
        self.index = index
        self.sequence = sequence
        """Its slot is valid once the session has assigned one."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        """One per token."""
        self.tops: dict[int, TopTokens] = {}
        """By index among the tokens; only if requested."""
        self.prompt_scores: PromptScores | None = None
        self.cached_tokens = 0
        """Prompt tokens found in the engine's prefix cache, as far as it has told."""
        self.sendable = 0
        """Tokens that are certain to be part of the output: these may be sent."""
        self.sent = 0
        self.finish_reason: str | None = None
        self.matched: int | str | None = None
        """The stop token or stop string that ended it."""
        self.failure: CallFailed | None = None
        self._on_change = on_change
        self._finder = finder
        self._keep_stop = keep_stop

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopTokens] = (),
        finish: FinishReason | None = None,
    ) -> None:
        """Add the next tokens. `finish` is set if the engine ended the sequence with the last of them."""
        if self.is_over:
            return
        first = len(self.token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        for top in tops:
            self.tops[first + top.index] = top
        # An EOS or stop token has no text.
        with_text = len(token_ids) - (finish in (FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE))
        if self._finder is None:
            self.sendable = len(self.token_ids)
        elif self._find_stop(self._finder, token_ids[:with_text]):
            finish = None
        if finish is not None:
            self._finish(finish)
        self._on_change()

    def fail(self, failure: CallFailed) -> None:
        """End it with an error."""
        if not self.is_over:
            self.failure = failure
            self._on_change()

    def cancel(self) -> None:
        """End it with the tokens it has."""
        if not self.is_over:
            self.finish_reason = CANCELLED
            self.sendable = len(self.token_ids)
            self._on_change()

    def _find_stop(self, finder: StopStringFinder, token_ids: Sequence[int]) -> bool:
        """Search for stop strings. Return True if one ends the sequence."""
        for token_id in token_ids:
            finder.feed(token_id)
            if finder.matched is not None:
                self._cut(finder.sendable)
                self.finish_reason, self.matched = "stop", finder.matched
                return True
        self.sendable = finder.sendable
        return False

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = _FINISH_REASONS[reason]
        if reason is FinishReason.STOP_SEQUENCE:
            self.matched = self.token_ids[-1]
            if not self._keep_stop:
                self._cut(len(self.token_ids) - 1)
        self.sendable = len(self.token_ids)

    def _cut(self, length: int) -> None:
        """Shorten the output to `length` tokens."""
        del self.token_ids[length:], self.logprobs[length:]
        self.sendable = length


class GatewayCall:
    """A request and the outputs of its sequences. `changed` is set whenever an output has changed."""

    def __init__(self, request: GatewayRequest, tokenizer: GatewayTokenizer | None) -> None:
        """`tokenizer` is needed if the request has stop strings."""
        self.request = request
        self.changed = asyncio.Event()
        self.outputs = [
            SequenceOutput(
                index,
                sequence,
                self.changed.set,
                finder=_finder(request, sequence, tokenizer),
                keep_stop=request.keep_stop,
            )
            for index, sequence in enumerate(request.sequences)
        ]

    @property
    def is_over(self) -> bool:
        """True if every output has ended."""
        return all(output.is_over for output in self.outputs)

    @property
    def failure(self) -> CallFailed | None:
        """The first error of an output. It ends the call."""
        return next((output.failure for output in self.outputs if output.failure is not None), None)

    def cancel(self) -> None:
        """End all outputs with the tokens they have."""
        for output in self.outputs:
            output.cancel()

    def next_chunk(self, output: SequenceOutput) -> pb.GenerateResponse | None:
        """Return the tokens that may be sent and were not, and count them as sent; None if there are none.

        A client that reads slowly gets larger chunks.
        """
        first, last = output.sent, output.sendable
        if first == last:
            return None
        output.sent = last
        chunk = pb.GenerateStreamChunk(
            token_ids=output.token_ids[first:last],
            sequence_index=output.index,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=last,
            cached_tokens=output.cached_tokens,
            logprobs=self._logprobs(output, first, last),
        )
        return pb.GenerateResponse(request_id=self.request.request_id, chunk=chunk)

    def complete(self, output: SequenceOutput) -> pb.GenerateResponse:
        """Return the whole of an output that is over."""
        message = pb.GenerateComplete(
            output_token_ids=output.token_ids,
            sequence_index=output.index,
            finish_reason=output.finish_reason or "",
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(output.token_ids),
            cached_tokens=output.cached_tokens,
            logprobs=self._logprobs(output, 0, len(output.token_ids)),
            prompt_logprobs=self._prompt_logprobs(),
        )
        if isinstance(output.matched, str):
            message.matched_stop_str = output.matched
        elif output.matched is not None:
            message.matched_token_id = output.matched
        return pb.GenerateResponse(request_id=self.request.request_id, complete=message)

    def _logprobs(self, output: SequenceOutput, first: int, last: int) -> list[pb.TokenLogprob]:
        """Return the log-probabilities of tokens [first, last); empty if not requested."""
        top_n = self.request.top_n
        if top_n is None:
            return []
        scored: list[pb.TokenLogprob] = []
        for index in range(first, last):
            message = pb.TokenLogprob(token_id=output.token_ids[index], logprob=output.logprobs[index])
            if (top := output.tops.get(index)) is not None:
                # Engines include ties at the nth; the client gets n.
                for token_id, logprob in zip(top.token_ids[:top_n], top.logprobs, strict=False):
                    message.top_logprobs.add(token_id=token_id, logprob=logprob)
            scored.append(message)
        return scored

    def _prompt_logprobs(self) -> list[pb.TokenLogprob]:
        """Return the log-probabilities of the prompt's tokens, NaN where unknown; empty if not requested.

        Only the first sequence has its prompt scored.
        """
        if self.request.prompt_top_n is None:
            return []
        scores = self.outputs[0].prompt_scores
        scored = [pb.TokenLogprob(token_id=token_id, logprob=math.nan) for token_id in self.request.prompt]
        if scores is None:
            return scored
        for message, logprob in zip(scored, scores.logprobs, strict=True):
            message.logprob = logprob
        for message, (token_ids, logprobs) in zip(scored, scores.tops or (), strict=False):
            for token_id, top in zip(token_ids, logprobs, strict=True):
                message.top_logprobs.add(token_id=token_id, logprob=top)
        return scored


def _finder(
    request: GatewayRequest, sequence: NewSequence, tokenizer: GatewayTokenizer | None
) -> StopStringFinder | None:
    if not request.stops or tokenizer is None:
        return None
    decoder = tokenizer.decoder_after(sequence.prompt)
    return StopStringFinder(
        request.stops, decoder.step, keep=request.keep_stop, min_tokens=sequence.stopping.min_new_tokens
    )
