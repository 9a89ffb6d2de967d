"""SimulatedShard: what a step engine's shard does with its orders, without a model. The rules are the real shard's
(`text_generation_shard.step.table`): orders apply at a step boundary; every decoding sequence with room in its grant and
every ordered chunk is in the step; nobody runs past its grant; a sequence that finishes is gone.

Steps come in spans: as long as the same sequences decode and nothing else happens, so many steps are one object, and
their times a sum that has a closed form. A span ends, at the latest, before somebody finishes, runs out of its grant, or
comes so close to its end that the scheduler wants to hear of it.

A sequence is followed by one number, `at`: where the token it generates next stands in the pool of ids. All else that
changes from step to step is a fixed distance from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from text_generation_bench.simulator.arrivals import Arrival
from text_generation_bench.simulator.machine import Machine
from text_generation_proto.values import FinishReason
from text_generation_router.request import RequestId
from text_generation_router.scheduling.growth import URGENT_ROOM
from text_generation_router.scheduling.steps import Admission, Orders, Outcome


class BrokenRule(Exception):
    """The scheduler, or the simulation, broke a rule. The run is worth nothing."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence. `at + shift` is its length: all tokens known, the one not yet computed among them."""

    slot: int
    request_id: RequestId
    arrival: Arrival
    blocks: list[int]
    prompt_length: int
    """Of this admission: with what was generated before it."""
    computed: int
    """While its prompt is prefilled: positions whose KV is there."""
    at: int
    end: int
    """`at` when its answer is whole."""
    longest: int
    """Positions whose KV may ever be needed, as the scheduler counts."""
    shift: int
    generated_before: int = 0
    capacity: int = 0
    hard: int = 0
    """`at` where it has to stop: it finishes, or its grant is used up."""
    stop: int = 0
    """`at` where a span ends: there, or where the scheduler wants to hear of it, from then on after every step."""

    def granted(self, block_size: int) -> None:
        """Its blocks are other ones than they were."""
        self.capacity = len(self.blocks) * block_size
        self.hard = min(self.end, self.capacity + 1 - self.shift)
        enough = self.capacity >= self.longest
        self.stop = self.hard if enough else min(self.hard, self.capacity - URGENT_ROOM + 1 - self.shift)


@dataclass(slots=True)
class Span:
    """Steps that differ in nothing but the length of what they attend to."""

    start: float
    """When the first of them began."""
    first_s: float
    """Seconds the first takes."""
    growth_s: float
    """By how much each takes longer than the one before."""
    steps: int
    decoding: list[Sequence]
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    """Only a span of one step has any."""

    def step(self, number: int) -> float:
        """Seconds its step `number` takes; the first is 1."""
        return self.first_s + self.growth_s * (number - 1)

    def seconds(self, steps: int) -> float:
        """How long its first `steps` steps take."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    @property
    def end(self) -> float:
        """When the last of its steps is over."""
        return self.start + self.seconds(self.steps)

    def after(self, steps: int) -> Span:
        """The rest of it, once `steps` steps are over."""
        start, first_s = self.start + self.seconds(steps), self.first_s + steps * self.growth_s
        return Span(start, first_s, self.growth_s, self.steps - steps, self.decoding)

    def steps_until(self, now: float) -> int:
        """Steps that are over at `now`."""
        passed = now - self.start
        if passed <= 0:
            return 0
        # The root of `seconds(n) = passed`, written so that it loses no digits where growth is next to nothing.
        linear = self.first_s - self.growth_s / 2
        done = min(self.steps, int(2 * passed / (linear + math.sqrt(linear * linear + 2 * self.growth_s * passed))))
        while done < self.steps and self.seconds(done + 1) <= passed:
            done += 1
        while done > 0 and self.seconds(done) > passed:
            done -= 1
        return done

    def steps_to_boundary(self, after: float) -> int:
        """Steps to the first boundary that is not before `after`."""
        done = self.steps_until(after)
        return done if done > 0 and self.start + self.seconds(done) >= after else min(done + 1, self.steps)


class SimulatedShard:
    """The sequences one replica holds."""

    def __init__(self, machine: Machine, num_slots: int, ids: tuple[int, ...]) -> None:
        self._machine = machine
        self._num_slots = num_slots
        self._ids = ids
        self._decoding: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}
        self._chunks: list[tuple[Sequence, int]] = []
        self.orders_applied = 0
        self.span: Span | None = None

    def clear(self) -> None:
        """A new session: nothing is held."""
        self._decoding.clear()
        self._prefilling.clear()
        self._chunks = []
        self.orders_applied = 0
        self.span = None

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def held(self) -> list[Sequence]:
        """Every sequence."""
        return [*self._prefilling.values(), *self._decoding.values()]

    def apply(self, orders: Orders, arrivals: Mapping[RequestId, Arrival]) -> None:
        """Make the changes ordered. Raises BrokenRule for what the real shard would refuse."""
        if orders.number != self.orders_applied + 1:
            raise BrokenRule(f"orders {orders.number} follow orders {self.orders_applied}")
        for slot in orders.release:
            if self._decoding.pop(slot, None) is None:
                self._prefilling.pop(slot, None)
        for admission in orders.admit:
            self._admit(admission, arrivals[admission.request.id])
        block_size = self._machine.block_size
        for slot, blocks in orders.grants:
            sequence = self._decoding.get(slot) or self._prefilling.get(slot)
            if sequence is not None:  # a grant may cross a finish
                sequence.blocks += blocks
                sequence.granted(block_size)
        for slot, tokens in orders.prefill:
            if (sequence := self._prefilling.get(slot)) is not None:
                self._order_chunk(sequence, tokens)
        self.orders_applied = orders.number

    def _admit(self, admission: Admission, arrival: Arrival) -> None:
        slot, request = admission.slot, admission.request
        before = len(admission.generated)
        if not 0 <= slot < self._num_slots or slot in self._decoding or slot in self._prefilling:
            raise BrokenRule(f"slot {slot} is taken, or is none of {self._num_slots}")
        length = len(request.prompt) + before
        if admission.cached_tokens >= length or admission.cached_tokens % self._machine.block_size:
            raise BrokenRule(f"{admission.cached_tokens} of {length} tokens cannot be cached")
        sequence = Sequence(
            slot,
            request.id,
            arrival,
            list(admission.blocks),
            prompt_length=length,
            computed=admission.cached_tokens,
            at=arrival.answer_at + before,
            end=arrival.answer_at + arrival.new_tokens,
            longest=len(request.prompt) + request.max_new_tokens - 1,
            shift=len(request.prompt) - arrival.answer_at,
            generated_before=before,
        )
        sequence.granted(self._machine.block_size)
        self._prefilling[slot] = sequence

    def _order_chunk(self, sequence: Sequence, tokens: int) -> None:
        end = sequence.computed + tokens
        if tokens < 1 or end > sequence.prompt_length or end > sequence.capacity:
            raise BrokenRule(f"a chunk of {tokens} does not fit slot {sequence.slot}")
        self._chunks.append((sequence, tokens))

    # ----------------------------------------------------------------------------------------------------------- steps

    def begin(self, now: float, most: int) -> Span | None:
        """Begin the next span, of at most `most` steps; None if there is nothing to compute."""
        machine = self._machine
        decoding = [one for one in self._decoding.values() if one.at < one.hard]
        rows = len(decoding)
        context = sum([one.at + one.shift for one in decoding])
        if self._chunks:
            chunks = [one for one in self._chunks if self._prefilling.get(one[0].slot) is one[0]]
            self._chunks = []
            if chunks:
                tokens = sum([chunk for _, chunk in chunks])
                pairs = sum([chunk * one.computed + chunk * (chunk + 1) // 2 for one, chunk in chunks])
                first = machine.step_s(tokens, rows + len(chunks), context, pairs)
                self.span = Span(now, first, 0.0, 1, decoding, chunks)
                return self.span
        if not decoding:
            self.span = None
            return None
        steps = max(1, min([one.stop - one.at for one in decoding]))
        first = machine.step_s(0, rows, context, 0)
        self.span = Span(now, first, machine.growth_s(rows), min(steps, most), decoding)
        return self.span

    def advance(self, steps: int) -> Outcome:
        """The first `steps` steps of the span are over: what they brought. The rest of it, if any, goes on."""
        span = self.span
        assert span is not None, "a step that never began is not over"
        assert 0 < steps <= span.steps, "more steps are over than began"
        seconds = span.seconds(steps)
        slots = [one.slot for one in span.decoding]
        finished: dict[int, FinishReason] = {}
        ids = self._ids
        if steps == 1:
            token_ids = [ids[one.at] for one in span.decoding]
            counts = []
        else:
            token_ids = []
            for one in span.decoding:
                token_ids += ids[one.at : one.at + steps]
            counts = [steps] * len(slots)
        for one in span.decoding:
            one.at += steps
            if one.at == one.end:
                finished[one.slot] = _reason(one)
        prefilled = [(one.slot, chunk) for one, chunk in span.chunks]
        for one, chunk in span.chunks:
            one.computed += chunk
            if one.computed == one.prompt_length:
                slots.append(one.slot)
                token_ids.append(ids[one.at])
                one.at += 1
                self._decoding[one.slot] = self._prefilling.pop(one.slot)
                if one.at == one.end:
                    finished[one.slot] = _reason(one)
        for slot in finished:
            del self._decoding[slot]
        self.span = None if steps == span.steps else span.after(steps)
        return Outcome(
            self.orders_applied, slots, counts, token_ids, finished, prefilled=prefilled, step_s=seconds, steps=steps
        )


def _reason(sequence: Sequence) -> FinishReason:
    arrival = sequence.arrival
    return FinishReason.LENGTH if arrival.new_tokens == arrival.max_new_tokens else FinishReason.EOS_TOKEN
