"""Small simulations to their end, and bugs of a scheduler that the simulator notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import pytest

from text_generation_bench.simulator.autoscaling import by_value
from text_generation_bench.simulator.config import LatencyTargets, Outage, SimConfig
from text_generation_bench.simulator.cost_model import CostModel
from text_generation_bench.simulator.shard import RuleViolation
from text_generation_bench.simulator.simulator import Simulator
from text_generation_bench.simulator.traces import Arrival, TokenPool
from text_generation_proto.values import FailureCode
from text_generation_router.request import Request
from text_generation_router.scheduling.messages import Deliveries, SchedulerOutput, StepOutput
from text_generation_router.scheduling.policy import Policy
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


def test_deadlines_end_queued_and_running_requests() -> None:
    long = [ask(0.0, new=50, most=50) for _ in range(4)]
    statistics = simulate(*long, ask(0.1, queue_s=0.05), ask(1.5, new=50, most=50, total_s=0.2)).statistics
    assert statistics.failed == {FailureCode.EXPIRED: 2}
    assert statistics.total.finished == 4


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


def lose_a_request(scheduler: Scheduler, request: Request, now: float) -> None:
    if request.id != 3:
        SUBMIT(scheduler, request, now)


def number_orders_wrongly(scheduler: Scheduler, replica: int) -> SchedulerOutput | None:
    orders = SCHEDULE(scheduler, replica)
    return orders and replace(orders, number=orders.number + 1)


def share_block_zero(scheduler: Scheduler, replica: int) -> SchedulerOutput | None:
    orders = SCHEDULE(scheduler, replica)
    return orders and replace(
        orders, placements=tuple(replace(new, blocks=(0, *new.blocks[1:])) for new in orders.placements)
    )


def deliver_the_end_twice(scheduler: Scheduler, replica: int, output: StepOutput, now: float) -> Deliveries:
    deliveries = UPDATE(scheduler, replica, output, now)
    deliveries.tokens += [token for token in deliveries.tokens if token[3] is not None]
    return deliveries


SUBMIT, SCHEDULE, UPDATE = Scheduler.submit, Scheduler.schedule, Scheduler.update


@pytest.mark.parametrize(
    ("method", "bug", "message"),
    [
        ("submit", lose_a_request, "never ended"),
        ("schedule", number_orders_wrongly, "follow orders"),
        ("schedule", share_block_zero, "block 0"),
        ("update", deliver_the_end_twice, "after its end"),
    ],
)
def test_a_bug_of_the_scheduler_is_noticed(
    method: str, bug: Callable[..., object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = [ask(0.01 * number, prompt=40, new=20, most=40) for number in range(12)]
    simulate(*trace)
    monkeypatch.setattr(Scheduler, method, bug)
    with pytest.raises(RuleViolation, match=message):
        simulate(*trace)


def test_replicas_come_with_load_and_go_without() -> None:
    """A rule that does not follow the load keeps one replica: it costs less, and most requests wait too long."""
    busy = [ask(0.8 * number, new=400, most=450) for number in range(750)]
    quiet = [ask(600.0 + 20 * number, new=400, most=450) for number in range(90)]
    roomy = replace(COST_MODEL, kv_tokens=4096)
    scaled, alone = (
        simulate(*busy, *quiet, cost_model=roomy, replicas=4, until=2400.0, audited=False, scaling=[rule])
        for rule in (by_value(attrgetter("busy_ratio"), 0.6), by_value(attrgetter("serving"), 1.0))
    )
    assert scaled.statistics.total.finished == alone.statistics.total.finished == 840
    assert alone.replica_seconds == pytest.approx(alone.now)
    assert 1.2 * scaled.now < scaled.replica_seconds < 0.6 * 4 * scaled.now
    assert scaled.statistics.total.good > 2 * alone.statistics.total.good
