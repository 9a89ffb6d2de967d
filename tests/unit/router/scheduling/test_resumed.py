"""Requests that go on in a new scheduler. Random ones: tests/property/test_scheduler_machine.py."""

from __future__ import annotations

import pytest
from scheduler_checks import assert_idle
from scheduler_rig import TOKEN, Rig, a_policy

from text_generation_proto.values import FailureCode, Grammar, GrammarKind
from text_generation_router.request import Moves, RequestProgress, TenantId

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")
ONCE = Moves(1, 1)


def ran(tokens: int, moves: Moves = ONCE) -> RequestProgress:
    return RequestProgress((TOKEN,) * tokens, moves)


def test_a_resumed_request_goes_first_to_its_last_token_and_is_charged_for_the_rest() -> None:
    rig = Rig(a_policy(), slots=1)
    rig.submit(new=5, tenant=TenantId("other"))
    resumed = rig.submit(new=30, tenant=TenantId("own"), progress=ran(20), queue_by=1.0, prompt_logprobs=True)
    waited = rig.submit(new=5, tenant=TenantId("other"), progress=RequestProgress())
    rig.now = 2.0
    rig.expire()  # its time in the queue was over before
    counters = {}
    while rig.scheduler.requests:
        rig.turn()
        counters |= {account.name: account.counter for account in rig.scheduler.queue.tenants}
    assert rig.finished == [resumed, 0, waited]
    assert (len(rig.placement(resumed).generated), rig.tokens[resumed], rig.failed) == (20, 10, {})
    assert counters["own"] <= 10
    stats = rig.scheduler.stats()
    assert (stats.moves, stats.prompt_tokens) == (1, 8)
    assert_idle(rig.scheduler)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    ("options", "progress", "problem"),
    [
        ({}, ran(3, Moves(3, 3)), "the shards that computed this request were lost"),
        ({}, ran(3, Moves(101, 1)), "the shards that computed this request were lost"),
        ({"new": 2000}, ran(3), "no replica can hold this request any more"),
        ({"grammar": GRAMMAR}, ran(3), "lost its shard; a constrained answer cannot go on elsewhere"),
        ({}, ran(3, Moves(100, 2)), None),
        ({"grammar": GRAMMAR}, ran(0), None),
    ],
)
def test_a_request_that_cannot_go_on_fails_once_a_replica_is_known(
    joined: bool, options: dict[str, object], progress: RequestProgress, problem: str | None
) -> None:
    rig = Rig(a_policy(max_request_moves=2), self_scheduling=True, replicas=0)

    def join() -> None:
        rig.scheduler.add()
        rig.sequences, rig.applied, rig.replicas = [{}], [0], 1
        rig.open(0)

    if joined:
        join()
    rig.submit(progress=progress, **options)  # type: ignore[arg-type]
    assert joined or not rig.failed
    if not joined:
        join()
    rig.until_idle()
    assert rig.messages == ({} if problem is None else {0: problem})
    assert all(kind is FailureCode.LOST for kind in rig.failed.values())
    assert_idle(rig.scheduler)


@pytest.mark.parametrize("comes", [True, False])
def test_a_request_that_ran_waits_for_a_larger_replica_that_has_not_joined(comes: bool) -> None:
    rig = Rig(a_policy(max_batch_prefill_tokens=2000), blocks=8)
    late = rig.scheduler.add()
    rig.sequences.append({})
    rig.applied.append(0)
    large, small = rig.submit(60, new=200, progress=ran(3)), rig.submit(10, new=5)
    rig.turns(10)
    assert (rig.finished, rig.failed) == ([small], {})
    if comes:
        rig.replicas = 2
        rig.open(late, blocks=40)
        rig.until_idle()
        assert rig.finished == [small, large]
    else:
        rig.receive(rig.scheduler.remove(late))
        assert rig.messages == {large: "no replica can hold this request any more"}
    assert_idle(rig.scheduler)
