"""The scheduler as a state machine, against the real bookkeeping of shards (echo engines, driven step by step).

Whatever clients do, whichever replica breaks, and however the races between them end: no step is over budget, no block has
two owners, what is said to be cached was computed, each request ends exactly once, nothing follows its end, its tokens are
right, the same calls give the same orders, and at the end nothing is left behind. The checks are those of `scheduler_world`;
tests/support/soak_scheduler.py runs the same for any number of events.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import World
from world_traffic import MOVES, draw_ask, draw_blocks, draw_world, move, play, some_request

RANDOMS = st.randoms(use_true_random=False)
REPLICAS = st.integers(0, 2)


class SchedulerMachine(RuleBasedStateMachine):
    """What can happen, in any order."""

    world: World | None = None

    @initialize(draw=RANDOMS)
    def start(self, draw: Random) -> None:
        self.world = draw_world(draw)

    @property
    def it(self) -> World:
        assert self.world is not None
        return self.world

    @rule(draw=RANDOMS, count=st.integers(1, 4))
    def submit(self, draw: Random, count: int) -> None:
        for _ in range(count):
            self.it.submit(draw_ask(draw))

    @precondition(lambda self: self.world.told)
    @rule(draw=RANDOMS, satisfied=st.booleans())
    def cancel(self, draw: Random, satisfied: bool) -> None:
        self.it.cancel(some_request(self.it, draw), satisfied)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.it.pass_time(seconds)

    @rule(replica=REPLICAS)
    def lose(self, replica: int) -> None:
        self.it.lose(replica % len(self.it.replicas))

    @rule(replica=REPLICAS)
    def open_again(self, replica: int) -> None:
        self.it.open(replica % len(self.it.replicas))

    @rule(replica=REPLICAS, draw=RANDOMS)
    def open_with_another_pool(self, replica: int, draw: Random) -> None:
        self.it.open(replica % len(self.it.replicas), draw_blocks(draw))

    @rule(replica=REPLICAS, draining=st.booleans())
    def drain(self, replica: int, draining: bool) -> None:
        self.it.drain(replica % len(self.it.replicas), draining)

    @rule(script=st.lists(st.tuples(st.sampled_from(MOVES), REPLICAS), min_size=5, max_size=60))
    def race(self, script: list[tuple[str, int]]) -> None:
        for what, replica in script:
            move(self.it, what, replica)

    @rule(rounds=st.integers(1, 30))
    def go_on(self, rounds: int) -> None:
        """Nobody lags behind for a while: sequences grow long, and pools run dry."""
        for number in range(rounds):
            move(self.it, "round", number)

    @invariant()
    def every_promise_is_kept(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.finish()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_twenty_thousand_random_events_break_no_promise() -> None:
    counts: Counter[str] = Counter()
    for seed in range(20):
        counts += play(seed, 1000)
    # They were no idle worlds.
    assert all(counts[what] > 5 for what in ("preemptions", "moves", "expired", "hit tokens", "refusals")), counts
