"""Ranks of one engine: replicas that share orders, reports and losses."""

from __future__ import annotations

from functools import reduce

from scheduler_checks import assert_idle, check_scheduler
from scheduler_rig import a_policy

from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.messages import Deliveries, ReplicaSpec, SchedulerOutput, StepOutput
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.convert import rank_outputs

RANKS = 2


class Shard:
    """A self-scheduling engine with RANKS ranks of two slots, and the scheduler."""

    def __init__(self, **policy: object) -> None:
        self.scheduler = Scheduler(a_policy(**policy), RANKS)
        self.requests = self.orders_sent = 0
        self.failed: list[tuple[int, FailureCode]] = []
        self.open()

    def open(self) -> None:
        self.orders_sent = 0
        for rank in range(RANKS):
            self.scheduler.open(rank, ReplicaSpec(2, 8, 16, self_scheduling=True, rank=rank, ranks=RANKS))

    def lose(self) -> None:
        for rank in range(RANKS):
            self.failed += [(each.request_id, each.kind) for each in self.scheduler.lose(rank).failed]

    def submit(self, count: int, new: int = 2) -> None:
        for _ in range(count):
            request = Request(
                RequestId(self.requests), tuple(range(100 * self.requests, 100 * self.requests + 20)), new
            )
            self.scheduler.submit(request, 0.0)
            self.requests += 1

    def order(self) -> SchedulerOutput:
        self.scheduler.dispatch()
        parts = (self.scheduler.schedule(rank, self.orders_sent + 1) for rank in range(RANKS))
        orders = reduce(SchedulerOutput.joined, filter(None, parts))
        self.orders_sent = orders.number
        check_scheduler(self.scheduler)
        return orders

    def report(self, *slots: int, **columns: object) -> Deliveries:
        output = StepOutput(self.orders_sent, slots, (), [7 + slot for slot in slots], **columns)  # type: ignore[arg-type]
        parts = enumerate(rank_outputs(output, RANKS, 2 * RANKS))
        first, *others = [self.scheduler.update(rank, part, 0.0) for rank, part in parts]
        for each in others:
            first.extend(each)
        check_scheduler(self.scheduler)
        return first


def test_orders_and_reports_are_for_all_ranks() -> None:
    shard = Shard()
    shard.submit(3)
    orders = shard.order()
    assert orders.number == 1
    assert {each.slot: each.rank for each in orders.placements} == {0: 0, 1: 0, 2: 1}
    told = shard.report(2, 0, 1)
    by_slot = {each.slot: each.request.id for each in orders.placements}
    assert {each[:3] for each in told.tokens} == {(by_slot[2], 0, 1), (by_slot[0], 1, 2), (by_slot[1], 2, 3)}
    shard.submit(1)
    [placement] = shard.order().placements
    assert (shard.orders_sent, placement.slot, placement.rank) == (2, 3, 1)
    ended = dict.fromkeys((0, 2), FinishReason.LENGTH)
    shard.scheduler.cancel(by_slot[1])
    shard.report(0, 2, 3, finished=ended)
    assert shard.order().release == (1,)
    shard.report(3, finished={3: FinishReason.LENGTH})
    assert_idle(shard.scheduler)


def test_a_rank_gets_its_part_of_a_report() -> None:
    output = StepOutput(1, [3, 0, 2, 1], [2, 1, 3, 1], list(range(7)), prefilled=[(2, 20), (1, 10)])
    one, two = rank_outputs(output, RANKS, 2 * RANKS)
    assert [(one.slots, one.token_counts, one.token_starts), (two.slots, two.token_counts, two.token_starts)] == [
        ([0, 1], [1, 1], [2, 6]),
        ([2, 3], [3, 2], [3, 0]),
    ]
    assert (one.prefilled, two.prefilled) == ([(1, 10)], [(2, 20)])


def test_a_suspect_is_alone_in_all_ranks_that_it_could_end() -> None:
    shard = Shard(max_request_moves=2)
    shard.submit(4)
    for _ in range(2):
        assert len(shard.order().placements) == 4
        shard.lose()
        shard.open()
    [suspect] = shard.order().placements
    shard.submit(1)
    [later] = shard.order().placements
    assert later.request.id == 4
    shard.lose()
    assert shard.failed == [(suspect.request.id, FailureCode.LOST)]
