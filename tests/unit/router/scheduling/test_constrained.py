"""Constrained requests at self-scheduling engines. Such an engine starts a grammar only at the end of the prompt, so a
request that has generated tokens cannot continue elsewhere."""

from __future__ import annotations

import pytest
from scheduler_checks import assert_idle
from scheduler_rig import Rig, a_policy

from text_generation_proto.values import FailureCode, Grammar, GrammarKind

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")


def test_a_started_constrained_request_fails_with_its_replica_and_others_move() -> None:
    rig = Rig(a_policy(), self_scheduling=True)
    constrained, free = rig.submit(new=40, grammar=GRAMMAR), rig.submit(new=40)
    rig.turns(5)
    assert rig.tokens[constrained] > 0
    rig.lose(0)
    assert rig.failed == {constrained: FailureCode.LOST}
    assert rig.messages == {constrained: "lost its shard; a constrained answer cannot go on elsewhere"}
    rig.open(0)
    rig.until_idle()
    assert (rig.finished, rig.tokens[free]) == ([free], 40)
    assert_idle(rig.scheduler)


def test_a_constrained_request_without_tokens_moves() -> None:
    rig = Rig(a_policy(), replicas=2, self_scheduling=True)
    sent = rig.submit(new=40, grammar=GRAMMAR)
    rig.scheduler.dispatch()
    replica = next(each.replica for each in rig.scheduler.replicas.values() if each is not None and each.occupied_slots)
    assert rig.scheduler.schedule(replica) is not None
    rig.lose(replica)
    rig.until_idle()
    assert (rig.finished, rig.tokens[sent], rig.failed) == ([sent], 40, {})
    assert rig.replica_of(sent) == 1 - replica
    assert rig.scheduler.stats().moves == 1


@pytest.mark.parametrize(
    ("self_scheduling", "constrained", "preempted"),
    [
        pytest.param(True, {2}, {1}, id="spares constrained requests"),
        pytest.param(True, {0, 1, 2}, set(), id="none if all are constrained"),
        pytest.param(False, {0, 1, 2}, {1, 2}, id="step engines spare none"),
    ],
)
def test_preemption(self_scheduling: bool, constrained: set[int], preempted: set[int]) -> None:
    rig = Rig(a_policy(), blocks=13, self_scheduling=self_scheduling)
    for number in range(3):
        rig.submit(10, new=60, grammar=GRAMMAR if number in constrained else None)
    rig.until_idle()
    assert {number for number in range(3) if len(rig.placements(number)) > 1} <= preempted
    assert (rig.scheduler.stats().preemptions > 0) == bool(preempted)
    assert (sorted(rig.finished), rig.failed) == ([0, 1, 2], {})
    assert_idle(rig.scheduler)
