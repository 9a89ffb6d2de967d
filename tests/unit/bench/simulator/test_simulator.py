"""Small simulations to their end, and schedulers with a planted bug, which the simulator must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from text_generation_bench.simulator.config import LatencyTargets, Outage, SimConfig
from text_generation_bench.simulator.cost_model import CostModel
from text_generation_bench.simulator.shard import RuleViolation
from text_generation_bench.simulator.simulator import Simulator
from text_generation_bench.simulator.traces import Arrival, TokenPool
from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.request import Priority, Request, RequestId, TenantId
from text_generation_router.scheduling.messages import Deliveries, SchedulerOutput, StepOutput
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.scheduler import Scheduler

COST_MODEL = CostModel(
    base_s=0.010,
    per_prefill_token_s=0.0001,
    per_row_s=0.0,
    per_context_token_s=0.0,
    per_pair_s=0.0,
    slots=4,
    kv_tokens=1024,
    block_size=16,
    prefill_budget=64,
    target_itl_s=0.05,
    growth_tokens=40,
)
POOL = TokenPool(1)
POLICY = Policy(max_batch_prefill_tokens=64, max_batch_size=4)


def simulate(*trace: Arrival, **changes: object) -> Simulator:
    """Run a simulation with one replica, unless `changes` of the configuration say otherwise."""
    config = SimConfig(COST_MODEL, POLICY, 1, LatencyTargets(2.0, 0.05), POOL.ids, audited=True)
    simulator = Simulator(replace(config, **changes))  # type: ignore[arg-type]
    simulator.run(iter(trace))
    return simulator


def ask(at: float, prompt: int = 32, new: int = 10, most: int = 50, **more: object) -> Arrival:
    first = int(at * 1000) + 100_000
    return Arrival(at, (first, *range(1, prompt)), new, most, 7, **more)  # type: ignore[arg-type]


def test_one_request_takes_the_time_of_its_orders_and_steps() -> None:
    simulator = simulate(ask(1.0, prompt=32, new=10))
    total = simulator.statistics.total
    prefill = 0.0003 + 0.010 + 32 * 0.0001
    assert (total.finished, total.itl.total) == (1, 9)
    assert total.ttft.longest == pytest.approx(prefill)
    assert total.itl.longest == pytest.approx(0.010)
    assert simulator.now == pytest.approx(1.0 + prefill + 9 * 0.010)
    assert simulator.statistics.busy_s == pytest.approx(prefill - 0.0003 + 9 * 0.010)


def test_prompt_larger_than_the_budget_takes_several_steps() -> None:
    statistics = simulate(ask(0.0, prompt=150, new=1)).statistics
    assert statistics.prefilled_tokens == 150
    assert statistics.busy_s == pytest.approx(3 * 0.010 + 150 * 0.0001)


def test_new_request_joins_at_a_boundary_and_lengthens_one_gap() -> None:
    itl = simulate(ask(0.0, prompt=16, new=40), ask(0.1234, prompt=48, new=1)).statistics.total.itl
    assert itl.total == 39
    assert itl.longest == pytest.approx(0.010 + 48 * 0.0001)


def test_spans_give_the_same_results_as_single_steps() -> None:
    trace = [ask(0.013 * number, prompt=20 + number % 90, new=1 + number * 7 % 60, most=64) for number in range(60)]
    spans, steps = simulate(*trace), simulate(*trace, max_span_steps=1)
    assert spans.events < steps.events
    assert spans.now == pytest.approx(steps.now)
    assert spans.statistics.busy_s == pytest.approx(steps.statistics.busy_s)
    for name in ("ttft", "itl"):
        histogram, expected = getattr(spans.statistics.total, name), getattr(steps.statistics.total, name)
        assert histogram.total == expected.total
        for share in (0.1, 0.5, 0.9, 1.0):
            assert histogram.quantile(share) == pytest.approx(expected.quantile(share), rel=0.02)


def test_next_turn_hits_the_prefix_of_the_last_answer() -> None:
    def again(now: float) -> Arrival:
        return Arrival(now + 1.0, (*first.prompt, *POOL.ids[7:39], 5), 4, 50, 900)

    first = ask(0.0, prompt=32, new=32, follow_up=again)
    simulator = simulate(first)
    assert simulator.statistics.total.finished == 2
    # 63 tokens were computed, all but the last token of the answer: three whole blocks.
    assert simulator.scheduler.stats().hit_tokens == 48
    assert simulator.ideal.hit_rate == pytest.approx(48 / (32 + 65))


def test_clients_that_leave_and_that_send_nothing_after_until() -> None:
    def again(now: float) -> Arrival:
        return ask(now + 0.5, follow_up=again)

    statistics = simulate(ask(0.0, new=50, leaves_after_s=0.2), ask(0.0, new=5)).statistics
    assert (statistics.cancelled, statistics.total.finished) == (1, 1)
    assert 5 < simulate(ask(0.0, follow_up=again), until=5.0).statistics.total.finished < 12


def test_deadlines_end_queued_and_running_requests() -> None:
    long = [ask(0.0, new=50, most=50) for _ in range(4)]
    statistics = simulate(*long, ask(0.1, queue_s=0.05), ask(1.5, new=50, most=50, total_s=0.2)).statistics
    assert statistics.failed == {FailureCode.EXPIRED: 2}
    assert statistics.total.finished == 4


def test_client_leaves_at_the_deadline_that_a_blind_scheduler_does_not_know() -> None:
    request = ask(0.0, new=50, total_s=0.2, tenant=TenantId("a"), priority=Priority.BULK)
    statistics = simulate(request, blind=True).statistics
    assert (statistics.cancelled, statistics.failed) == (1, {})


def test_full_queue_and_oversized_prompt_are_rejected() -> None:
    statistics = simulate(
        *(ask(0.0, prompt=60) for _ in range(40)), policy=replace(POLICY, max_queued_tokens=200)
    ).statistics
    assert 0 < statistics.rejected < 40
    assert statistics.total.finished == 40 - statistics.rejected
    assert simulate(ask(0.0, prompt=1000, most=50)).statistics.rejected == 1


def test_lost_and_preempting_replicas_cost_no_request() -> None:
    trace = [ask(0.05 * number, new=40, most=50) for number in range(40)]
    simulator = simulate(*trace, replicas=2, outages=[Outage(0.51, 0, 0.4), Outage(1.3, 1, 0.4)])
    assert simulator.scheduler.stats().moves > 0
    assert (simulator.statistics.total.finished, simulator.statistics.failed) == (40, {})
    trace = [ask(0.001 * number, prompt=40, new=100, most=120) for number in range(8)]
    simulator = simulate(*trace, cost_model=replace(COST_MODEL, kv_tokens=256))
    assert simulator.scheduler.stats().preemptions > 0
    assert simulator.statistics.total.finished == 8


def test_requests_wait_for_the_return_of_the_only_replica() -> None:
    total = simulate(ask(0.0, new=50, most=50), outages=[Outage(0.2, 0, 3.0)]).statistics.total
    assert total.finished == 1
    assert total.itl.longest > 3.0


def test_queue_time_estimates_are_compared_with_actual_ones() -> None:
    statistics = simulate(*(ask(0.02 * number, prompt=60, new=40) for number in range(200))).statistics
    assert len(statistics.queue_time_ratios) > 50
    assert statistics.queue_time_ratio is not None


# ---------------------------------------------------------------------------------------------- schedulers with a bug

Patch = Callable[[pytest.MonkeyPatch], None]


def lose_a_request(patch: pytest.MonkeyPatch) -> None:
    submit = Scheduler.submit

    def submit_most(self: Scheduler, request: Request, now: float) -> None:
        if request.id != 3:
            submit(self, request, now)

    patch.setattr(Scheduler, "submit", submit_most)


def exceed_the_batch_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaScheduler, "may_place", lambda self, waiting: self.occupied_slots < self.spec.num_slots)


def changed_deliveries(change: Callable[[Deliveries], None]) -> Patch:
    def plant(patch: pytest.MonkeyPatch) -> None:
        update = Scheduler.update

        def updated(self: Scheduler, replica: int, output: StepOutput, now: float) -> Deliveries:
            deliveries = update(self, replica, output, now)
            change(deliveries)
            return deliveries

        patch.setattr(Scheduler, "update", updated)

    return plant


def changed_orders(change: Callable[[SchedulerOutput], SchedulerOutput]) -> Patch:
    def plant(patch: pytest.MonkeyPatch) -> None:
        schedule = Scheduler.schedule

        def scheduled(self: Scheduler, replica: int) -> SchedulerOutput | None:
            orders = schedule(self, replica)
            return None if orders is None else change(orders)

        patch.setattr(Scheduler, "schedule", scheduled)

    return plant


def deliver_the_end_twice(deliveries: Deliveries) -> None:
    deliveries.tokens += [token for token in deliveries.tokens if token[3] is not None]


def drop_tokens(deliveries: Deliveries) -> None:
    deliveries.tokens = [token for token in deliveries.tokens if token[3] is not None or token[1] == 0]


def change_the_finish_reason(deliveries: Deliveries) -> None:
    deliveries.tokens = [(*token[:3], FinishReason.LENGTH if token[3] else None) for token in deliveries.tokens]


def claim_more_cached_tokens(orders: SchedulerOutput) -> SchedulerOutput:
    placements = tuple(
        replace(new, cached_tokens=16) if len(new.request.prompt) > 32 else new for new in orders.placements
    )
    chunks = dict(orders.prefill)
    for new in placements:
        if new.cached_tokens:
            chunks[new.slot] = min(chunks.get(new.slot, 0), len(new.request.prompt) - 16)
    return replace(orders, placements=placements, prefill=tuple(chunks.items()))


def share_block_zero(orders: SchedulerOutput) -> SchedulerOutput:
    return replace(orders, placements=tuple(replace(new, blocks=(0, *new.blocks[1:])) for new in orders.placements))


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (exceed_the_batch_size, "sequences run on a replica"),
        (lose_a_request, "never ended"),
        (changed_deliveries(deliver_the_end_twice), "after its end"),
        (changed_deliveries(drop_tokens), "finished with"),
        (changed_deliveries(change_the_finish_reason), "finished by"),
        (changed_orders(lambda orders: replace(orders, prefill=((0, 65),))), "65 prompt tokens"),
        (changed_orders(lambda orders: replace(orders, number=orders.number + 1)), "follow orders"),
        (changed_orders(claim_more_cached_tokens), "KV of another prefix"),
        (changed_orders(share_block_zero), "block 0"),
        (
            lambda patch: patch.setattr(Scheduler, "requests", property(lambda _: (RequestId(1),))),
            "still in the scheduler",
        ),
    ],
)
def test_planted_bug_is_noticed(plant: Patch, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = [ask(0.01 * number, prompt=40, new=20, most=40) for number in range(12)]
    policy = replace(POLICY, max_batch_size=3)
    simulate(*trace, policy=policy)
    plant(monkeypatch)
    with pytest.raises(RuleViolation, match=message):
        simulate(*trace, policy=policy)
