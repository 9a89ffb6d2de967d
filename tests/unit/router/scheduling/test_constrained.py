"""Who follows a grammar at an engine that schedules for itself can go on nowhere else once it has begun: such an engine
follows a grammar from the end of the prompt only."""

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
    """A rig that knows grammars, and what those who failed were told."""

    told: dict[int, str] = field(default_factory=dict)

    def constrained(self, prompt: int = 4, new: int = 40) -> int:
        """A request that follows a grammar; its number."""
        number = self.submitted
        self.submitted += 1
        request = Request(RequestId(number), words(number + 1, prompt), new, grammar=GRAMMAR)
        self.scheduler.submit(request, self.now)
        return number

    def hear(self, deliveries: Deliveries) -> None:
        super().hear(deliveries)
        self.told |= {failed.request_id: failed.message for failed in deliveries.failed}


@dataclass
class SelfRig(ConstrainedRig):
    """Its replicas schedule for themselves, and have room for whatever they are given."""

    def spec(self, blocks: int) -> ReplicaSpec:
        return ReplicaSpec(self.slots, blocks, BLOCK, self_scheduling=True)

    def take_orders(self, here: dict[int, Sequence], orders: SchedulerOutput) -> dict[int, int]:
        super().take_orders(here, orders)
        for sequence in here.values():
            sequence.to_prefill, sequence.room = 0, 1 << 20
        return {}


def test_one_that_has_begun_fails_with_its_replica_and_others_move() -> None:
    rig = SelfRig(a_policy())
    bound, free = rig.constrained(), rig.submit(new=40)
    rig.turns(5)
    assert rig.tokens[bound] > 0
    rig.lose(0)
    assert rig.failed == {bound: FailureCode.LOST}
    assert rig.told == {bound: LOST}
    rig.open(0)
    rig.until_idle()
    assert (rig.finished, rig.tokens[free]) == ([free], 40)
    assert_idle(rig.scheduler)


def test_one_that_has_generated_nothing_moves_as_usual() -> None:
    rig = SelfRig(a_policy(), replicas=2)
    sent = rig.constrained()
    rig.scheduler.dispatch()
    home = next(each.replica for each in rig.scheduler.replicas if each is not None and each.occupied_slots)
    assert rig.scheduler.schedule(home) is not None
    rig.lose(home)
    rig.until_idle()
    assert (rig.finished, rig.tokens[sent], rig.failed) == ([sent], 40, {})
    assert rig.home(sent) == 1 - home
    assert rig.scheduler.stats().moves == 1


def test_at_step_engines_it_goes_on_elsewhere_with_what_it_generated() -> None:
    rig = ConstrainedRig(a_policy(), replicas=2)
    rig.constrained()
    rig.turns(6)
    had = rig.tokens[0]
    assert had > 0
    rig.lose(rig.home(0))
    rig.until_idle()
    assert (rig.failed, rig.finished) == ({}, [0])
    assert len(rig.admission(0).generated) == had


def test_one_that_waits_is_none_of_the_lost_replicas_business() -> None:
    rig = SelfRig(a_policy(max_batch_size=1))
    rig.constrained(new=3)
    rig.constrained(new=3)
    rig.turn()
    rig.lose(0)
    assert list(rig.failed) == [0]
    rig.open(0)
    rig.until_idle()
    assert rig.finished == [1]


def test_a_full_cache_takes_those_who_can_come_back() -> None:
    rig = SelfRig(a_policy(), blocks=13)
    first = rig.submit(10, new=60)
    free = rig.submit(10, new=60)
    bound = rig.constrained(10, new=60)
    rig.until_idle()
    # The newest would have to go, were it free to.
    assert rig.scheduler.stats().preemptions > 0
    assert {request: len(rig.admissions(request)) > 1 for request in (first, free, bound)} == {
        first: False,
        free: True,
        bound: False,
    }
    assert sorted(rig.finished) == [first, free, bound]
    assert_idle(rig.scheduler)


def test_where_nobody_can_come_back_nobody_goes() -> None:
    rig = SelfRig(a_policy(), blocks=13)
    for _ in range(3):
        rig.constrained(10, new=60)
    rig.until_idle()
    assert rig.scheduler.stats().preemptions == 0
    assert (sorted(rig.finished), rig.failed) == ([0, 1, 2], {})
    assert_idle(rig.scheduler)


def test_a_step_engine_preempts_those_who_follow_a_grammar_like_any_other() -> None:
    rig = ConstrainedRig(a_policy(), blocks=13)
    for _ in range(3):
        rig.constrained(10, new=60)
    rig.until_idle()
    assert rig.scheduler.stats().preemptions > 0
    assert sorted(rig.finished) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_none_is_sent_that_cannot_go_on(seed: int) -> None:
    draw = Random(seed)
    rig = SelfRig(a_policy(max_moves=draw.randint(0, 2)), blocks=draw.randint(8, 14), replicas=2)
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
        admission.generated for _, orders in rig.orders for admission in orders.placements if admission.request.grammar
    )
    ended = [*rig.finished, *rig.failed]
    assert len(ended) == len(set(ended))
    assert sorted((*ended, *cancelled)) == list(range(rig.submitted))
    assert {number for number, why in rig.told.items() if why == LOST} <= constrained
