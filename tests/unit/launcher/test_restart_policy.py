from __future__ import annotations

from collections.abc import Sequence

import pytest

from text_generation_launcher.shard_restarts import DELAYS, STABLE_AFTER, FailureStreak, RestartPolicy
from text_generation_proto.exit_codes import ExitCode

KILLED = -9


def row_of(policy: RestartPolicy, served: Sequence[float], exit_code: int = KILLED) -> FailureStreak:
    """The row after deaths that came so many seconds after the shard had begun to serve."""
    row = FailureStreak()
    for seconds in served:
        row = policy.after_death(row, seconds, exit_code)
    return row


def test_each_death_in_a_row_is_waited_out_longer_up_to_half_a_minute() -> None:
    policy = RestartPolicy(max_restarts=100)
    delays = [policy.delay(row_of(policy, [0.0] * deaths)) for deaths in range(1, 12)]
    assert delays == [0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_a_stretch_of_serving_starts_the_row_over() -> None:
    policy = RestartPolicy()
    assert row_of(policy, [0.0, 1.0, STABLE_AFTER - 0.1]).deaths == 3
    assert row_of(policy, [0.0, 1.0, STABLE_AFTER]).deaths == 1
    assert policy.delay(row_of(policy, [0.0, 1.0, STABLE_AFTER, 0.0])) == DELAYS[1]


def test_it_is_hopeless_once_the_restarts_in_a_row_are_used_up() -> None:
    policy = RestartPolicy(max_restarts=5)
    hopeless = [policy.hopeless(row_of(policy, [0.0] * deaths)) for deaths in range(8)]
    assert hopeless == [False] * 6 + [True] * 2


def test_a_hopeless_shard_that_has_served_after_all_has_all_its_restarts_again() -> None:
    policy = RestartPolicy(max_restarts=2)
    row = row_of(policy, [0.0] * 9)
    assert policy.hopeless(row)
    row = policy.after_death(row, STABLE_AFTER, KILLED)
    assert not policy.hopeless(row)
    assert policy.delay(row) == DELAYS[0]


def test_a_hopeless_shard_is_still_tried_at_the_longest_interval() -> None:
    policy = RestartPolicy(max_restarts=2)
    assert policy.delay(row_of(policy, [0.0] * 2)) == DELAYS[1]
    assert policy.delay(row_of(policy, [0.0] * 3)) == DELAYS[-1]


def test_settings_that_make_no_sense_are_hopeless_at_once_and_only_so_long() -> None:
    policy = RestartPolicy()
    row = policy.after_death(FailureStreak(), 0.0, ExitCode.USAGE)
    assert policy.hopeless(row)
    assert policy.delay(row) == DELAYS[-1]
    assert not policy.hopeless(policy.after_death(row, 0.0, KILLED))


@pytest.mark.parametrize("served", [0.0, STABLE_AFTER])
def test_without_restarts_the_first_death_is_the_last(served: float) -> None:
    policy = RestartPolicy(max_restarts=0)
    row = row_of(policy, [served])
    assert policy.hopeless(row)
    assert policy.delay(row) is None
