"""The simulated shard against the real shard's bookkeeping, and spans of steps."""

from __future__ import annotations

from random import Random

import pytest

from text_generation_bench.simulator.cost_model import CostModel
from text_generation_bench.simulator.shard import RuleViolation, SimulatedShard, StepSpan
from text_generation_bench.simulator.traces import Arrival, TokenPool
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import Stopping
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.messages import Placement, SchedulerOutput
from text_generation_shard import engine
from text_generation_shard.step.sequence import SamplerOutput
from text_generation_shard.step.table import SequenceTable

BLOCK, SLOTS, BLOCKS = 4, 4, 4096
COST_MODEL = CostModel(0.01, 0.001, 0.001, 1e-5, 1e-6, SLOTS, BLOCK * BLOCKS, BLOCK, 16, 0.1, 8)
POOL = TokenPool(3)
EOS = 1_000_000


INFO = engine.EngineInfo(
    engine="test",
    model_id="",
    model_type="",
    dtype="",
    device="",
    scheduling=engine.Scheduling.STEP,
    vocab_size=EOS + 1,
    max_sequence_length=BLOCK * BLOCKS,
    max_slots=SLOTS,
    block_size=BLOCK,
    eos_token_ids=(EOS,),
    suggested_prefill_tokens=16,
    max_top_n_tokens=0,
)


class BothShards:
    """The simulated shard and the bookkeeping of the real one, with the same orders."""

    def __init__(self) -> None:
        self.simulated = SimulatedShard(COST_MODEL, SLOTS, POOL.ids)
        self.real = SequenceTable(INFO, (CacheGroup(BLOCKS),))
        self.arrivals: dict[RequestId, Arrival] = {}
        self.by_slot: dict[int, Arrival] = {}
        self.generated: dict[int, int] = {}
        self.now = 0.0

    def apply(self, orders: SchedulerOutput) -> None:
        self.simulated.apply(orders, self.arrivals)
        for new in orders.placements:
            self.by_slot[new.slot] = self.arrivals[new.request.id]
            self.generated[new.slot] = len(new.generated)
        admissions = tuple(
            engine.NewSequence(
                slot=new.slot,
                prompt=(*new.request.prompt, *new.generated),
                stopping=Stopping(new.request.max_new_tokens - len(new.generated), frozenset({EOS})),
                blocks=new.blocks,
                computed_tokens=new.cached_tokens,
                generated_tokens=len(new.generated),
            )
            for new in orders.placements
        )
        failures = self.real.apply(
            engine.Orders(orders.number, orders.release, admissions, orders.allocations, orders.prefill)
        )
        assert not failures

    def real_step(self) -> engine.StepResult:
        rows = self.real.rows()
        sampled: list[int] = []
        for row in rows.others:
            if row.samples:
                slot = row.sequence.slot
                arrival = self.by_slot[slot]
                at = self.generated[slot]
                last = at + 1 == arrival.new_tokens < arrival.max_new_tokens
                sampled.append(EOS if last else POOL.ids[arrival.answer_at + at])
                self.generated[slot] += 1
        self.real.begin(rows)
        return self.real.advance(rows, SamplerOutput(sampled, [0.0] * len(sampled)))

    def compare(self, steps: int) -> None:
        """Run up to `steps` steps as one span of the simulated shard and singly on the real one; compare the results."""
        span = self.simulated.begin(self.now, steps)
        if span is None:
            result = self.real_step()
            assert not result.slots
            assert not result.prefilled
            return
        self.now = span.end
        count = span.steps
        output = self.simulated.advance(count)
        tokens: dict[int, list[int]] = {}
        prefilled: list[tuple[int, int]] = []
        finished: dict[int, str] = {}
        for _ in range(count):
            result = self.real_step()
            for slot, token in zip(result.slots, result.token_ids, strict=True):
                tokens.setdefault(slot, []).append(token)
            prefilled += result.prefilled
            finished |= {slot: reason.value for slot, reason in result.finished}
        counts = output.token_counts or [1] * len(output.slots)
        first = 0
        for slot, number in zip(output.slots, counts, strict=True):
            expected = list(output.token_ids[first : first + number])
            first += number
            if finished.get(slot) == "eos_token":
                expected[-1] = EOS
            assert tokens.pop(slot) == expected
        assert not tokens
        assert sorted(output.prefilled) == sorted(prefilled)
        assert {slot: reason.value for slot, reason in output.finished.items()} == finished

    def random_orders(self, random: Random, number: int) -> SchedulerOutput:
        held = {sequence.slot: sequence for sequence in self.simulated.held}
        release = tuple(slot for slot in held if random.random() < 0.05)
        placements, allocations, prefill = [], [], []
        for slot in range(SLOTS):
            if slot in release:
                continue
            if (sequence := held.get(slot)) is not None:
                if random.random() < 0.5:
                    allocations.append((slot, tuple(random.sample(range(BLOCKS), random.randint(1, 3)))))
                if sequence.computed < sequence.prompt_length and random.random() < 0.7:
                    prefill.append((slot, random.randint(1, sequence.prompt_length - sequence.computed)))
            elif random.random() < 0.5:
                placements.append(self.random_placement(random, slot))
                if random.random() < 0.7:
                    rest = (
                        len(placements[-1].request.prompt)
                        + len(placements[-1].generated)
                        - placements[-1].cached_tokens
                    )
                    prefill.append((slot, random.randint(1, rest)))
        return SchedulerOutput(number, release, tuple(placements), tuple(allocations), tuple(prefill))

    def random_placement(self, random: Random, slot: int) -> Placement:
        most = random.randint(1, 60)
        arrival = Arrival(0.0, POOL.text(random, random.randint(1, 30)), random.randint(1, most), most, 17)
        request = Request(RequestId(len(self.arrivals)), arrival.prompt, most)
        self.arrivals[request.id] = arrival
        before = random.choice([0, random.randint(0, arrival.new_tokens - 1)])
        known = len(arrival.prompt) + before
        blocks = tuple(random.sample(range(BLOCKS), -(-known // BLOCK) + random.randint(0, 4)))
        cached = (known - 1) // BLOCK * BLOCK if random.random() < 0.3 else 0
        return Placement(slot, request, POOL.ids[17 : 17 + before], blocks, cached)


@pytest.mark.parametrize("seed", range(20))
def test_results_equal_those_of_the_real_shard(seed: int) -> None:
    random = Random(seed)
    both = BothShards()
    for number in range(1, 60):
        both.apply(both.random_orders(random, number))
        for _ in range(random.randint(1, 4)):
            both.compare(random.choice([1, 1, 5, 1000]))


def placed() -> tuple[SimulatedShard, Request]:
    """Return a shard with a request of 6 prompt tokens and 20 new tokens in slot 2."""
    shard = SimulatedShard(COST_MODEL, SLOTS, POOL.ids)
    arrival = Arrival(0.0, tuple(range(6)), 20, 20, 100)
    request = Request(RequestId(1), arrival.prompt, 20)
    placement = Placement(2, request, (), tuple(range(8)))
    shard.apply(SchedulerOutput(1, placements=(placement,), prefill=((2, 6),)), {request.id: arrival})
    return shard, request


def test_orders_that_the_real_shard_rejects_violate_a_rule() -> None:
    shard, request = placed()
    arrivals = {request.id: Arrival(0.0, request.prompt, 20, 20, 100)}
    with pytest.raises(RuleViolation, match="slot 2 is taken"):
        shard.apply(SchedulerOutput(2, placements=(Placement(2, request, (), (9,)),)), arrivals)
    with pytest.raises(RuleViolation, match="follow orders"):
        shard.apply(SchedulerOutput(5), {})
    with pytest.raises(RuleViolation, match="does not fit slot 2"):
        shard.apply(SchedulerOutput(2, prefill=((2, 7),)), {})
    with pytest.raises(RuleViolation, match="cannot be cached"):
        shard.apply(SchedulerOutput(2, placements=(Placement(1, request, (), (9, 10), cached_tokens=3),)), arrivals)


@pytest.mark.parametrize("growth", [0.0, 1e-9, 0.01, 3.0])
def test_times_of_a_span(growth: float) -> None:
    span = StepSpan(2.0, 0.25, growth, 20, [])
    ends = [2.0 + sum(0.25 + growth * step for step in range(steps)) for steps in range(21)]
    assert span.end == pytest.approx(ends[20])
    assert span.after(7).end == pytest.approx(ends[20])
    assert span.after(7).start == pytest.approx(ends[7])
    for steps, end in enumerate(ends):
        assert span.start + span.seconds(steps) == pytest.approx(end)
        assert span.steps_until(end + 1e-6) == steps
        if steps:
            assert span.steps_until(end - 1e-6) == steps - 1
            assert span.steps_to_boundary(end - 1e-6) == steps
    assert (span.steps_until(0.0), span.steps_until(1e9)) == (0, 20)
    assert (span.steps_to_boundary(2.0), span.steps_to_boundary(1e9)) == (1, 20)
