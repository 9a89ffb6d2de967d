"""Small worlds played to their end, and schedulers with a bug that is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from text_generation_bench.simulator.config import LatencyTargets, Outage, SimConfig
from text_generation_bench.simulator.cost_model import CostModel
from text_generation_bench.simulator.shard import RuleViolation
from text_generation_bench.simulator.simulator import Simulator
from text_generation_bench.simulator.traces import Arrival, TokenPool
from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.request import Priority, RequestId, TenantId
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


def simulator(*, replicas: int = 1, policy: Policy = POLICY, **changes: object) -> Simulator:
    config = SimConfig(COST_MODEL, policy, replicas, LatencyTargets(2.0, 0.05), POOL.ids, audited=True)
    return Simulator(replace(config, **changes))  # type: ignore[arg-type]


def ask(at: float, prompt: int = 32, new: int = 10, most: int = 50, **more: object) -> Arrival:
    first = int(at * 1000) + 100_000
    return Arrival(at, (first, *range(1, prompt)), new, most, 7, **more)  # type: ignore[arg-type]


def test_one_request_takes_the_time_of_its_steps_and_of_its_orders() -> None:
    simulation = simulator()
    simulation.run(iter([ask(1.0, prompt=32, new=10)]))
    figures = simulation.statistics.total
    assert figures.finished == 1
    prefill = 0.0003 + 0.010 + 32 * 0.0001
    assert figures.ttft.longest == pytest.approx(prefill)
    assert figures.itl.total == 9
    assert figures.itl.longest == pytest.approx(0.010)
    assert simulation.now == pytest.approx(1.0 + prefill + 9 * 0.010)
    assert simulation.statistics.busy_s == pytest.approx(prefill - 0.0003 + 9 * 0.010)


def test_a_prompt_larger_than_the_budget_takes_several_steps() -> None:
    simulation = simulator()
    simulation.run(iter([ask(0.0, prompt=150, new=1)]))
    assert simulation.statistics.prefilled_tokens == 150
    assert simulation.statistics.busy_s == pytest.approx(3 * 0.010 + 150 * 0.0001)


def test_a_newcomer_joins_at_a_boundary_and_stretches_one_gap() -> None:
    simulation = simulator()
    simulation.run(iter([ask(0.0, prompt=16, new=40), ask(0.1234, prompt=48, new=1)]))
    itl = simulation.statistics.total.itl
    assert itl.total == 39
    assert itl.longest == pytest.approx(0.010 + 48 * 0.0001)


def test_many_steps_at_once_give_what_single_steps_give() -> None:
    trace = [ask(0.013 * number, prompt=20 + number % 90, new=1 + number * 7 % 60, most=64) for number in range(60)]
    leaping, stepping = simulator(), simulator(max_span_steps=1)
    leaping.run(iter(trace))
    stepping.run(iter(trace))
    assert leaping.events < stepping.events
    assert leaping.now == pytest.approx(stepping.now)
    assert leaping.statistics.busy_s == pytest.approx(stepping.statistics.busy_s)
    for share in (0.1, 0.5, 0.9, 1.0):
        for figures in ("ttft", "itl"):
            one, other = getattr(leaping.statistics.total, figures), getattr(stepping.statistics.total, figures)
            assert one.total == other.total
            assert one.quantile(share) == pytest.approx(other.quantile(share), rel=0.02)


def test_the_next_turn_hits_what_the_last_one_left() -> None:
    def again(now: float) -> Arrival:
        return Arrival(now + 1.0, (*first.prompt, *POOL.ids[7:39], 5), 4, 50, 900)

    first = ask(0.0, prompt=32, new=32, follow_up=again)
    simulation = simulator()
    simulation.run(iter([first]))
    assert simulation.statistics.total.finished == 2
    # 63 tokens were computed: all but the last token of the answer. Three whole blocks of them.
    assert simulation.scheduler.stats().hit_tokens == 48
    assert simulation.ideal.hit_rate == pytest.approx(48 / (32 + 65))


def test_nobody_sends_after_the_end_of_the_trace() -> None:
    def again(now: float) -> Arrival:
        return ask(now + 0.5, follow_up=again)

    simulation = simulator(until=5.0)
    simulation.run(iter([ask(0.0, follow_up=again)]))
    assert 5 < simulation.statistics.total.finished < 12


def test_a_client_that_leaves_is_counted_and_holds_nothing() -> None:
    simulation = simulator()
    simulation.run(iter([ask(0.0, new=50, leaves_after_s=0.2), ask(0.0, new=5)]))
    assert (simulation.statistics.cancelled, simulation.statistics.total.finished) == (1, 1)


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    long = [ask(0.0, new=50, most=50) for _ in range(4)]
    in_queue = ask(0.1, queue_s=0.05)
    running = ask(1.5, new=50, most=50, total_s=0.2)
    simulation = simulator()
    simulation.run(iter([*long, in_queue, running]))
    assert simulation.statistics.failed == {FailureCode.EXPIRED: 2}
    assert simulation.statistics.total.finished == 4


def test_a_blind_scheduler_hears_nothing_of_deadlines_and_the_client_leaves() -> None:
    simulation = simulator(blind=True)
    simulation.run(iter([ask(0.0, new=50, total_s=0.2, tenant=TenantId("one"), priority=Priority.BULK)]))
    assert simulation.statistics.cancelled == 1
    assert not simulation.statistics.failed


def test_too_much_work_is_refused() -> None:
    simulation = simulator(policy=replace(POLICY, max_queued_tokens=200))
    simulation.run(iter([ask(0.0, prompt=60) for _ in range(40)]))
    assert 0 < simulation.statistics.refused < 40
    assert simulation.statistics.total.finished == 40 - simulation.statistics.refused


def test_what_can_never_fit_is_refused() -> None:
    simulation = simulator()
    simulation.run(iter([ask(0.0, prompt=1000, most=50)]))
    assert simulation.statistics.refused == 1


def test_a_lost_replica_costs_time_but_no_request() -> None:
    trace = [ask(0.05 * number, new=40, most=50) for number in range(40)]
    simulation = simulator(replicas=2, outages=[Outage(0.51, 0, 0.4), Outage(1.3, 1, 0.4)])
    simulation.run(iter(trace))
    assert simulation.scheduler.stats().moves > 0
    assert simulation.statistics.total.finished == 40
    assert not simulation.statistics.failed


def test_the_only_replica_may_come_back() -> None:
    simulation = simulator(outages=[Outage(0.2, 0, 3.0)])
    simulation.run(iter([ask(0.0, new=50, most=50)]))
    assert simulation.statistics.total.finished == 1
    assert simulation.statistics.total.itl.longest > 3.0


def test_preempted_requests_go_on_where_they_were() -> None:
    cost_model = replace(COST_MODEL, kv_tokens=256)
    simulation = simulator(cost_model=cost_model)
    simulation.run(iter([ask(0.001 * number, prompt=40, new=100, most=120) for number in range(8)]))
    assert simulation.scheduler.stats().preemptions > 0
    assert simulation.statistics.total.finished == 8


def test_a_wait_that_was_foreseen_is_held_against_the_true_one() -> None:
    simulation = simulator()
    simulation.run(iter([ask(0.02 * number, prompt=60, new=40) for number in range(200)]))
    assert len(simulation.statistics.queue_time_ratios) > 50
    assert simulation.statistics.queue_time_ratio is not None


# ------------------------------------------------------------------------------------------- schedulers that have a bug

Patch = Callable[[pytest.MonkeyPatch], None]


def forgets_a_request(patch: pytest.MonkeyPatch) -> None:
    submit = Scheduler.submit

    def forgetful(self: Scheduler, request: object, now: float) -> None:
        if request.id != 3:  # type: ignore[attr-defined]
            submit(self, request, now)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "submit", forgetful)


def says_twice_that_a_request_ended(patch: pytest.MonkeyPatch) -> None:
    apply = Scheduler.update

    def stuttering(self: Scheduler, replica: int, outcome: StepOutput, now: float) -> Deliveries:
        deliveries = apply(self, replica, outcome, now)
        deliveries.tokens += [one for one in deliveries.tokens if one[3] is not None]
        return deliveries

    patch.setattr(Scheduler, "update", stuttering)


def swallows_tokens(patch: pytest.MonkeyPatch) -> None:
    apply = Scheduler.update

    def swallowing(self: Scheduler, replica: int, outcome: StepOutput, now: float) -> Deliveries:
        deliveries = apply(self, replica, outcome, now)
        deliveries.tokens = [one for one in deliveries.tokens if one[3] is not None or now < 0.05]
        return deliveries

    patch.setattr(Scheduler, "update", swallowing)


def calls_an_end_by_another_name(patch: pytest.MonkeyPatch) -> None:
    apply = Scheduler.update

    def mistaken(self: Scheduler, replica: int, outcome: StepOutput, now: float) -> Deliveries:
        deliveries = apply(self, replica, outcome, now)
        deliveries.tokens = [(*one[:3], FinishReason.LENGTH if one[3] else None) for one in deliveries.tokens]
        return deliveries

    patch.setattr(Scheduler, "update", mistaken)


def changed_orders(change: Callable[[SchedulerOutput], SchedulerOutput]) -> Patch:
    def bug(patch: pytest.MonkeyPatch) -> None:
        decide = Scheduler.schedule

        def deciding(self: Scheduler, replica: int) -> SchedulerOutput | None:
            orders = decide(self, replica)
            return None if orders is None else change(orders)

        patch.setattr(Scheduler, "schedule", deciding)

    return bug


def claims_more_cached(orders: SchedulerOutput) -> SchedulerOutput:
    admit = tuple(replace(one, cached_tokens=16) if len(one.request.prompt) > 32 else one for one in orders.placements)
    chunks = dict(orders.prefill)
    for one in admit:
        if one.cached_tokens:
            chunks[one.slot] = min(chunks.get(one.slot, 0), len(one.request.prompt) - 16)
    return replace(orders, placements=admit, prefill=tuple(chunks.items()))


def gives_everybody_block_zero(orders: SchedulerOutput) -> SchedulerOutput:
    return replace(orders, placements=tuple(replace(one, blocks=(0, *one.blocks[1:])) for one in orders.placements))


def runs_more_than_it_may(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaScheduler, "may_place", lambda self, waiting: self.occupied_slots < self.spec.num_slots)


@pytest.mark.parametrize(
    ("bug", "noticed"),
    [
        (runs_more_than_it_may, "sequences run on a replica"),
        (forgets_a_request, "never ended"),
        (says_twice_that_a_request_ended, "after its end"),
        (swallows_tokens, "finished with"),
        (calls_an_end_by_another_name, "finished by"),
        (changed_orders(lambda orders: replace(orders, prefill=((0, 65),))), "65 prompt tokens"),
        (changed_orders(lambda orders: replace(orders, number=orders.number + 1)), "follow orders"),
        (changed_orders(claims_more_cached), "KV of another prefix"),
        (changed_orders(gives_everybody_block_zero), "block 0"),
    ],
)
def test_a_bug_is_noticed(bug: Patch, noticed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trace() -> Iterator[Arrival]:
        for number in range(12):
            yield ask(0.01 * number, prompt=40, new=20, most=40)

    policy = replace(POLICY, max_batch_size=3)
    simulator(policy=policy).run(trace())
    bug(monkeypatch)
    with pytest.raises(RuleViolation, match=noticed):
        simulator(policy=policy).run(trace())


def test_what_is_left_in_the_scheduler_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "requests", property(lambda _: (RequestId(1),)))
    with pytest.raises(RuleViolation, match="still in the scheduler"):
        simulator().run(iter([ask(0.0)]))
