"""The scheduler as a state machine, against the real bookkeeping of shards (echo engines, driven step by step).

For all orders of events of clients, replicas and the network: no step is over budget, each block and slot has one owner,
cached tokens were computed, each request ends exactly once with the right tokens, and at the end nothing is left behind.
The checks are in `scheduler_world`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import SchedulerWorld
from world_traffic import ACTIONS, DISTURBANCES, act, disturb, draw_request, draw_request_id, draw_world, play

from text_generation_router.scheduling import checkpoints, copies, roles


@pytest.fixture(scope="module", autouse=True)
def many_checkpoints() -> Iterator[None]:
    """Let checkpoints of states be left in prompts as short as those here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "SPACING", 48)
        patch.setattr(checkpoints, "MIN_GAIN", 16)
        patch.setattr(copies, "MIN_LOADED_TOKENS", 16)
        patch.setattr(roles, "LEAST_PROMPT", 40)
        patch.setattr(roles, "LEAST_ANSWER", 2)
        yield


RANDOMS = st.randoms(use_true_random=False)
REPLICAS = st.integers(0, 2)


class SchedulerMachine(RuleBasedStateMachine):
    """All events, in any order."""

    @initialize(draw=RANDOMS)
    def start(self, draw: Random) -> None:
        self.world: SchedulerWorld = draw_world(draw)

    @rule(draw=RANDOMS, count=st.integers(1, 4))
    def submit(self, draw: Random, count: int) -> None:
        for _ in range(count):
            self.world.submit(draw_request(self.world, draw))

    @precondition(lambda self: self.world.views)
    @rule(draw=RANDOMS, satisfied=st.booleans())
    def cancel(self, draw: Random, satisfied: bool) -> None:
        self.world.cancel(draw_request_id(self.world, draw), satisfied)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(event=st.sampled_from(DISTURBANCES), replica=REPLICAS, draw=RANDOMS)
    def disturb(self, event: str, replica: int, draw: Random) -> None:
        disturb(self.world, event, replica, draw)

    @rule(script=st.lists(st.tuples(st.sampled_from(ACTIONS), REPLICAS), min_size=5, max_size=60))
    def race(self, script: list[tuple[str, int]]) -> None:
        for action, replica in script:
            act(self.world, action, replica)

    @rule(rounds=st.integers(1, 30))
    def run_rounds(self, rounds: int) -> None:
        """Rounds without delays: sequences grow long, and pools run out of blocks."""
        for number in range(rounds):
            act(self.world, "round", number)

    @invariant()
    def rules_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=40)


def test_random_events_break_no_rule() -> None:
    counts: Counter[str] = Counter()
    for seed in range(settings().max_examples // 2):
        counts += play(seed, 1000).counts
    # The worlds were busy.
    assert all(
        counts[event] > 5
        for event in (
            *("preemptions", "moves", "expired", "hit tokens", "refusals", "joins", "leaves", "resumed"),
            *("stores", "loads", "failed loads"),
        )
    ), counts


def test_the_same_calls_give_the_same_results() -> None:
    for seed in (1, 2, 3):
        assert play(seed, 500).history == play(seed, 500).history
