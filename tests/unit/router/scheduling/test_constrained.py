"""Constrained requests at self-scheduling engines. Such an engine starts a grammar only at the end of the prompt, so a
request that has generated tokens cannot continue elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from scheduler_checks import assert_idle
from scheduler_rig import BLOCK, Rig, Sequence, a_policy, words

from text_generation_proto.values import FailureCode, Grammar, GrammarKind
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.messages import Deliveries, ReplicaSpec, SchedulerOutput

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")
LOST = "lost its shard; a constrained answer cannot go on elsewhere"


@dataclass
class ConstrainedRig(Rig):
    """A rig with constrained requests that records error messages."""

    messages: dict[int, str] = field(default_factory=dict)

    def constrained(self, prompt: int = 4, new: int = 40) -> int:
        """Submit a request with a grammar and return its number."""
        number = self.submitted
        self.submitted += 1
        request = Request(RequestId(number), words(number + 1, prompt), new, grammar=GRAMMAR)
        self.scheduler.submit(request, self.now)
        return number

    def receive(self, deliveries: Deliveries) -> None:
        super().receive(deliveries)
        self.messages |= {failed.request_id: failed.message for failed in deliveries.failed}


@dataclass
class SelfRig(ConstrainedRig):
    """A rig with self-scheduling replicas that have room for any sequence."""

    def spec(self, blocks: int) -> ReplicaSpec:
        return ReplicaSpec(self.slots, blocks, BLOCK, self_scheduling=True)

    def take_orders(self, here: dict[int, Sequence], orders: SchedulerOutput) -> dict[int, int]:
        super().take_orders(here, orders)
        for sequence in here.values():
            sequence.to_prefill, sequence.room = 0, 1 << 20
        return {}


def test_a_started_constrained_request_fails_with_its_replica_and_others_move() -> None:
    rig = SelfRig(a_policy())
    constrained, free = rig.constrained(), rig.submit(new=40)
    rig.turns(5)
    assert rig.tokens[constrained] > 0
    rig.lose(0)
    assert rig.failed == {constrained: FailureCode.LOST}
    assert rig.messages == {constrained: LOST}
    rig.open(0)
    rig.until_idle()
    assert (rig.finished, rig.tokens[free]) == ([free], 40)
    assert_idle(rig.scheduler)


def test_a_constrained_request_without_tokens_moves() -> None:
    rig = SelfRig(a_policy(), replicas=2)
    sent = rig.constrained()
    rig.scheduler.dispatch()
    replica = next(each.replica for each in rig.scheduler.replicas if each is not None and each.occupied_slots)
    assert rig.scheduler.schedule(replica) is not None
    rig.lose(replica)
    rig.until_idle()
    assert (rig.finished, rig.tokens[sent], rig.failed) == ([sent], 40, {})
    assert rig.replica_of(sent) == 1 - replica
    assert rig.scheduler.stats().moves == 1


def test_at_step_engines_a_constrained_request_continues_elsewhere() -> None:
    rig = ConstrainedRig(a_policy(), replicas=2)
    rig.constrained()
    rig.turns(6)
    had = rig.tokens[0]
    assert had > 0
    rig.lose(rig.replica_of(0))
    rig.until_idle()
    assert (rig.failed, rig.finished) == ({}, [0])
    assert len(rig.placement(0).generated) == had


@pytest.mark.parametrize(
    ("kind", "constrained", "preempted"),
    [
        pytest.param(SelfRig, {2}, {1}, id="spares constrained requests"),
        pytest.param(SelfRig, {0, 1, 2}, set(), id="none if all are constrained"),
        pytest.param(ConstrainedRig, {0, 1, 2}, {1, 2}, id="step engines spare none"),
    ],
)
def test_preemption(kind: type[ConstrainedRig], constrained: set[int], preempted: set[int]) -> None:
    rig = kind(a_policy(), blocks=13)
    for number in range(3):
        (rig.constrained if number in constrained else rig.submit)(10, new=60)
    rig.until_idle()
    assert {number for number in range(3) if len(rig.placements(number)) > 1} <= preempted
    assert (rig.scheduler.stats().preemptions > 0) == bool(preempted)
    assert (sorted(rig.finished), rig.failed) == ([0, 1, 2], {})
    assert_idle(rig.scheduler)


@pytest.mark.parametrize("seed", range(20))
def test_random_events_never_send_a_started_constrained_request(seed: int) -> None:
    draw = Random(seed)
    rig = SelfRig(a_policy(max_request_moves=draw.randint(0, 2)), blocks=draw.randint(8, 14), replicas=2)
    constrained: set[int] = set()
    cancelled: set[int] = set()
    gone: set[int] = set()
    for _ in range(150):
        what = draw.random()
        if what < 0.15:
            prompt, new = draw.randint(1, 40), draw.randint(1, 60)
            if draw.random() < 0.5:
                constrained.add(rig.constrained(prompt, new))
            else:
                rig.submit(prompt, new)
        elif what < 0.2 and rig.scheduler.requests:
            leaving = draw.choice(rig.scheduler.requests)
            rig.scheduler.cancel(leaving)
            cancelled.add(leaving)
        elif what < 0.24:
            replica = draw.randrange(2)
            (rig.open if replica in gone else rig.lose)(replica)
            gone ^= {replica}
        else:
            rig.turn()
        rig.scheduler.check_invariants()
    for replica in gone:
        rig.open(replica)
    rig.until_idle()
    assert_idle(rig.scheduler)
    assert not any(
        placement.generated for _, orders in rig.orders for placement in orders.placements if placement.request.grammar
    )
    ended = [*rig.finished, *rig.failed]
    assert len(ended) == len(set(ended))
    assert sorted((*ended, *cancelled)) == list(range(rig.submitted))
    assert {number for number, why in rig.messages.items() if why == LOST} <= constrained
