"""A simulated shard: a step engine without a model.

It follows the rules of the real shard (`text_generation_shard.step.table`): orders apply at a step boundary; a step has
every ordered chunk and every decoding sequence with room in its blocks; no sequence runs past its blocks; a finished
sequence is removed.

Steps come in spans: while the same sequences decode and nothing else happens, many steps are one object, and their total
duration has a closed form. A span ends before a sequence finishes, runs out of blocks, or comes so close to that point
that the scheduler needs a report.

The state of a decoding sequence is one number, `at`: the index of its next token in the pool of ids. Everything else that
changes from step to step has a fixed distance from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from text_generation_bench.simulator.cost_model import CostModel
from text_generation_bench.simulator.traces import Arrival
from text_generation_proto.copies import Copy
from text_generation_proto.values import FinishReason
from text_generation_router.request import RequestId
from text_generation_router.scheduling.kv_cache import URGENT_ROOM
from text_generation_router.scheduling.messages import Placement, SchedulerOutput, StepOutput


class RuleViolation(Exception):
    """The scheduler or the simulation violated a rule; the results are invalid."""


@dataclass(slots=True, eq=False)
class SimSequence:
    """A sequence. Its length, `at + shift`, counts all known tokens, including the one not yet computed."""

    slot: int
    request_id: RequestId
    arrival: Arrival
    blocks: list[int]
    prompt_length: int
    """Length at admission, including tokens generated before it."""
    computed: int
    """Number of computed positions during prefill."""
    at: int
    end: int
    """`at` when its answer is complete."""
    longest: int
    """Most positions whose KV it may need, as the scheduler counts."""
    shift: int
    generated_before: int = 0
    capacity: int = 0
    hard: int = 0
    """`at` at which it must stop: it finishes, or its blocks are full."""
    stop: int = 0
    """`at` at which a span ends: `hard`, or earlier where the scheduler needs a report after every step."""

    def update_limits(self, block_size: int) -> None:
        """Update the limits after a change of `blocks`."""
        self.capacity = len(self.blocks) * block_size
        self.hard = min(self.end, self.capacity + 1 - self.shift)
        enough = self.capacity >= self.longest
        self.stop = self.hard if enough else min(self.hard, self.capacity - URGENT_ROOM + 1 - self.shift)


@dataclass(slots=True)
class StepSpan:
    """Consecutive steps that differ only in context length."""

    start: float
    """Start of the first step."""
    first_s: float
    """Duration of the first step."""
    growth_s: float
    """Difference of the durations of consecutive steps."""
    steps: int
    decoding: list[SimSequence]
    chunks: list[tuple[SimSequence, int]] = field(default_factory=list)
    """Only in a span of one step."""

    def step(self, number: int) -> float:
        """Return the duration of step `number`; the first is 1."""
        return self.first_s + self.growth_s * (number - 1)

    def seconds(self, steps: int) -> float:
        """Return the duration of the first `steps` steps."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    @property
    def end(self) -> float:
        """End of the last step."""
        return self.start + self.seconds(self.steps)

    def after(self, steps: int) -> StepSpan:
        """Return the rest of the span after `steps` steps."""
        start, first_s = self.start + self.seconds(steps), self.first_s + steps * self.growth_s
        return StepSpan(start, first_s, self.growth_s, self.steps - steps, self.decoding)

    def steps_until(self, now: float) -> int:
        """Return the number of steps that have ended at `now`."""
        passed = now - self.start
        if passed <= 0:
            return 0
        # The root of `seconds(n) = passed`, in a form that loses no digits if growth is tiny.
        linear = self.first_s - self.growth_s / 2
        done = min(self.steps, int(2 * passed / (linear + math.sqrt(linear * linear + 2 * self.growth_s * passed))))
        while done < self.steps and self.seconds(done + 1) <= passed:
            done += 1
        while done > 0 and self.seconds(done) > passed:
            done -= 1
        return done

    def steps_to_boundary(self, after: float) -> int:
        """Return the number of steps to the first boundary at or after `after`."""
        done = self.steps_until(after)
        return done if done > 0 and self.start + self.seconds(done) >= after else min(done + 1, self.steps)


class SimulatedShard:
    """The sequences of one replica."""

    def __init__(self, cost_model: CostModel, num_slots: int, ids: tuple[int, ...]) -> None:
        self._cost_model = cost_model
        self._num_slots = num_slots
        self._ids = ids
        self._decoding: dict[int, SimSequence] = {}
        self._prefilling: dict[int, SimSequence] = {}
        self._chunks: list[tuple[SimSequence, int]] = []
        self.orders_applied = 0
        self.span: StepSpan | None = None
        self._copies: list[tuple[float, Copy]] = []
        """The copies under way, and when each ends."""
        self._copying_until = {True: 0.0, False: 0.0}
        """The time at which the loads, and the stores, under way have ended."""

    def clear(self) -> None:
        """Start a new session without sequences."""
        self._decoding.clear()
        self._prefilling.clear()
        self._chunks = []
        self._copies = []
        self.orders_applied = 0
        self.span = None

    def begin_copies(self, orders: SchedulerOutput, now: float) -> float | None:
        """Begin the copies of orders; return when the last of them ends, None without any."""
        if not orders.copies:
            return None
        model, ends = self._cost_model, self._copying_until
        for copy in orders.copies:
            seconds = len(copy.groups[0].host) * model.block_size * model.copied_token_s
            ends[copy.is_load] = max(now, ends[copy.is_load]) + seconds
            self._copies.append((ends[copy.is_load], copy))
        return max(ends[copy.is_load] for copy in orders.copies)

    def copied(self, now: float) -> list[Copy]:
        """Return the copies that have ended since the last call."""
        ended = [copy for end, copy in self._copies if end <= now]
        self._copies = [each for each in self._copies if each[0] > now]
        return ended

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def held(self) -> list[SimSequence]:
        """All sequences."""
        return [*self._prefilling.values(), *self._decoding.values()]

    def apply(self, orders: SchedulerOutput, arrivals: Mapping[RequestId, Arrival]) -> None:
        """Apply orders. Raises RuleViolation where the real shard would reject them."""
        if orders.number != self.orders_applied + 1:
            raise RuleViolation(f"orders {orders.number} follow orders {self.orders_applied}")
        for slot in orders.release:
            if self._decoding.pop(slot, None) is None:
                self._prefilling.pop(slot, None)
        for admission in orders.placements:
            self._admit(admission, arrivals[admission.request.id])
        block_size = self._cost_model.block_size
        for slot, blocks in orders.allocations:
            sequence = self._decoding.get(slot) or self._prefilling.get(slot)
            if sequence is not None:  # it may have finished meanwhile
                sequence.blocks += blocks
                sequence.update_limits(block_size)
        for slot, tokens in orders.prefill:
            if (sequence := self._prefilling.get(slot)) is not None:
                self._order_chunk(sequence, tokens)
        self.orders_applied = orders.number

    def _admit(self, admission: Placement, arrival: Arrival) -> None:
        slot, request = admission.slot, admission.request
        before = len(admission.generated)
        if not 0 <= slot < self._num_slots or slot in self._decoding or slot in self._prefilling:
            raise RuleViolation(f"slot {slot} is taken, or not below {self._num_slots}")
        length = len(request.prompt) + before
        if admission.cached_tokens >= length or admission.cached_tokens % self._cost_model.block_size:
            raise RuleViolation(f"{admission.cached_tokens} of {length} tokens cannot be cached")
        sequence = SimSequence(
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
        sequence.update_limits(self._cost_model.block_size)
        self._prefilling[slot] = sequence

    def _order_chunk(self, sequence: SimSequence, tokens: int) -> None:
        end = sequence.computed + tokens
        if tokens < 1 or end > sequence.prompt_length or end > sequence.capacity:
            raise RuleViolation(f"a chunk of {tokens} does not fit slot {sequence.slot}")
        self._chunks.append((sequence, tokens))

    # ----------------------------------------------------------------------------------------------------------- steps

    def begin(self, now: float, max_steps: int) -> StepSpan | None:
        """Start the next span, of at most `max_steps` steps; None if there is nothing to compute."""
        cost_model = self._cost_model
        decoding = [sequence for sequence in self._decoding.values() if sequence.at < sequence.hard]
        rows = len(decoding)
        context = sum([sequence.at + sequence.shift for sequence in decoding])
        if self._chunks:
            chunks = [sequence for sequence in self._chunks if self._prefilling.get(sequence[0].slot) is sequence[0]]
            self._chunks = []
            if chunks:
                tokens = sum([chunk for _, chunk in chunks])
                pairs = sum([chunk * sequence.computed + chunk * (chunk + 1) // 2 for sequence, chunk in chunks])
                first = cost_model.step_s(tokens, rows + len(chunks), context, pairs)
                self.span = StepSpan(now, first, 0.0, 1, decoding, chunks)
                return self.span
        if not decoding:
            self.span = None
            return None
        steps = max(1, min([sequence.stop - sequence.at for sequence in decoding]))
        first = cost_model.step_s(0, rows, context, 0)
        self.span = StepSpan(now, first, cost_model.growth_s(rows), min(steps, max_steps), decoding)
        return self.span

    def advance(self, steps: int) -> StepOutput:
        """Return the results of the first `steps` steps of the span; the rest of it continues."""
        span = self.span
        assert span is not None, "no span has started"
        assert 0 < steps <= span.steps, "the span has fewer steps"
        seconds = span.seconds(steps)
        slots = [sequence.slot for sequence in span.decoding]
        finished: dict[int, FinishReason] = {}
        ids = self._ids
        if steps == 1:
            token_ids = [ids[sequence.at] for sequence in span.decoding]
            counts = []
        else:
            token_ids = []
            for sequence in span.decoding:
                token_ids += ids[sequence.at : sequence.at + steps]
            counts = [steps] * len(slots)
        for sequence in span.decoding:
            sequence.at += steps
            if sequence.at == sequence.end:
                finished[sequence.slot] = _reason(sequence)
        prefilled = [(sequence.slot, chunk) for sequence, chunk in span.chunks]
        for sequence, chunk in span.chunks:
            sequence.computed += chunk
            if sequence.computed == sequence.prompt_length:
                slots.append(sequence.slot)
                token_ids.append(ids[sequence.at])
                sequence.at += 1
                self._decoding[sequence.slot] = self._prefilling.pop(sequence.slot)
                if sequence.at == sequence.end:
                    finished[sequence.slot] = _reason(sequence)
        for slot in finished:
            del self._decoding[slot]
        self.span = None if steps == span.steps else span.after(steps)
        return StepOutput(
            self.orders_applied, slots, counts, token_ids, finished, prefilled=prefilled, step_s=seconds, steps=steps
        )


def _reason(sequence: SimSequence) -> FinishReason:
    arrival = sequence.arrival
    return FinishReason.LENGTH if arrival.new_tokens == arrival.max_new_tokens else FinishReason.EOS_TOKEN
