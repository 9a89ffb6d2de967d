"""The restart policy, and the root cause of the end of a group."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from text_generation_common.exit_codes import ExitCode
from text_generation_launcher.restarts import DELAYS, STABLE_AFTER, FailureStreak, RestartPolicy, UnitExit
from text_generation_launcher.units import root_cause

KILLED = -9
LOST = int(ExitCode.BUG)
"""Exit code of a shard that lost a peer."""


def streak_after(policy: RestartPolicy, served: Sequence[float], exit_code: int = KILLED) -> FailureStreak:
    """Return the streak after deaths that each followed this many seconds of serving."""
    streak = FailureStreak()
    for seconds in served:
        streak = policy.after_death(streak, seconds, exit_code)
    return streak


def test_delays_grow_to_half_a_minute() -> None:
    policy = RestartPolicy(max_restarts=100)
    delays = [policy.delay(streak_after(policy, [0.0] * deaths)) for deaths in range(1, 12)]
    assert delays == [0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_streak_is_hopeless_after_max_restarts_and_has_the_longest_delay() -> None:
    policy = RestartPolicy(max_restarts=5)
    streaks = [streak_after(policy, [0.0] * deaths) for deaths in range(8)]
    assert [policy.hopeless(streak) for streak in streaks] == [False] * 6 + [True] * 2
    assert [policy.delay(streak) for streak in streaks[5:]] == [4.0, DELAYS[-1], DELAYS[-1]]


def test_stable_serving_starts_a_new_streak() -> None:
    policy = RestartPolicy(max_restarts=2)
    assert streak_after(policy, [0.0, 1.0, STABLE_AFTER - 0.1]).deaths == 3
    again = streak_after(policy, [0.0, 1.0, 0.0, STABLE_AFTER])
    assert (again.deaths, policy.hopeless(again), policy.delay(again)) == (1, False, DELAYS[0])


def test_usage_error_is_hopeless_until_the_next_death() -> None:
    policy = RestartPolicy()
    streak = streak_after(policy, [0.0], ExitCode.USAGE)
    assert policy.hopeless(streak)
    assert policy.delay(streak) == DELAYS[-1]
    assert not policy.hopeless(policy.after_death(streak, 0.0, KILLED))


@pytest.mark.parametrize("served", [0.0, STABLE_AFTER])
def test_without_restarts_the_first_death_is_hopeless(served: float) -> None:
    policy = RestartPolicy(max_restarts=0)
    streak = streak_after(policy, [served])
    assert (policy.hopeless(streak), policy.delay(streak)) == (True, None)


@pytest.mark.parametrize(
    ("codes", "expected"), [([-9], 0), ([LOST, -9, LOST], 1), ([1, LOST, -15], 0), ([LOST, LOST], 0)]
)
def test_root_cause_is_the_first_exit_that_is_not_a_consequence(codes: list[int], expected: int) -> None:
    ends = [UnitExit(f"shard-0-rank-{rank}", code) for rank, code in enumerate(codes)]
    assert root_cause(ends) is ends[expected]
