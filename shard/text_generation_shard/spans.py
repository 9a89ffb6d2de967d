"""The spans of sequences on a shard, from the steps of a session.

    shard                 from the orders that admit the sequence to its end
      ├── prefill chunk   each step that computed a part of its prompt
      └── decode          from the step of its first new token to its end

Only sequences whose orders carry a trace have spans. While one runs, the tokens of each step are counted by slot.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from text_generation_shard.engine import Failure, NewSequence, Orders, StepResult

if TYPE_CHECKING:
    from text_generation_common.tracer import AttributeValue, OpenSpan, Tracer

MAX_CHUNKS = 32
"""Chunks of a sequence that have spans; further ones are left out."""


@dataclass(slots=True)
class _Traced:
    """A sequence that runs. Times are of the monotonic clock, in seconds."""

    sequence: NewSequence
    span: "OpenSpan"
    tokens_before: int
    """New tokens of its slot before it was admitted."""
    chunks: list[tuple[float, float, int]] = field(default_factory=list)
    """Begin and end of the steps, and prompt tokens computed in them."""
    prefilled: int = 0
    first_token: float = 0.0


@dataclass(slots=True)
class SequenceSpans:
    """Follows the traced sequences of one session. Used on the engine's thread, and after it."""

    tracer: "Tracer | None" = None
    """Without it nothing is traced."""
    engine: str = ""
    _traced: dict[int, _Traced] = field(default_factory=dict)
    """By slot."""
    _tokens: Counter[int] = field(default_factory=Counter)
    """New tokens by slot, of all its sequences, while any is traced."""

    def ordered(self, orders: Orders, failures: Sequence[Failure]) -> None:
        """Follow the new sequences of orders that were applied, and end those that they release or that failed."""
        if self.tracer is None:
            return
        now = time.monotonic()
        for slot in orders.release:
            self._end(slot, now, "released")
        for sequence in orders.placements:
            if sequence.trace is not None and (span := self.tracer.begin("shard", now, sequence.trace)) is not None:
                self._traced[sequence.slot] = _Traced(sequence, span, self._tokens[sequence.slot])
        self._fail(failures, now)

    def stepped(self, result: StepResult, took_ns: int) -> None:
        traced = self._traced
        if not traced:
            return
        end = time.monotonic()
        start = end - took_ns / 1e9
        if result.token_counts:
            for slot, tokens in zip(result.slots, result.token_counts, strict=True):
                self._tokens[slot] += tokens
        else:
            self._tokens.update(result.slots)
        for slot, tokens in result.prefilled:
            if (one := traced.get(slot)) is not None:
                one.prefilled += tokens
                if len(one.chunks) < MAX_CHUNKS:
                    one.chunks.append((start, end, tokens))
                if one.prefilled >= len(one.sequence.prompt) - one.sequence.computed_tokens:
                    one.first_token = one.first_token or end
        for slot, reason in result.finished:
            self._end(slot, end, reason.value)
        self._fail(result.failed, end)

    def close(self) -> None:
        """End all sequences: the session is over."""
        now = time.monotonic()
        for slot in tuple(self._traced):
            self._end(slot, now, "session closed")

    def _fail(self, failures: Sequence[Failure], now: float) -> None:
        for failure in failures:
            self._end(failure.slot, now, failure.code.value, failed=True)

    def _end(self, slot: int, now: float, reason: str, *, failed: bool = False) -> None:
        one = self._traced.pop(slot, None)
        if one is None or self.tracer is None:
            return
        for start, end, tokens in one.chunks:
            self.tracer.child(one.span, "prefill chunk", start, end, {"text_generation.prompt_tokens": tokens})
        if one.first_token:
            self.tracer.child(one.span, "decode", one.first_token, now, {})
        sequence = one.sequence
        attributes: dict[str, AttributeValue] = {
            "text_generation.engine": self.engine,
            "text_generation.slot": slot,
            "text_generation.end": reason,
            "text_generation.prompt_tokens": len(sequence.prompt),
            "text_generation.computed_tokens": sequence.computed_tokens,
            "text_generation.resumed_tokens": sequence.generated_tokens,
            "text_generation.generated_tokens": sequence.generated_tokens + self._tokens[slot] - one.tokens_before,
        }
        self.tracer.end(one.span, now, attributes, failed=failed)
