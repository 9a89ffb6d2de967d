"""Orders leave at once to an idle replica, and late in a step of a busy one."""

from __future__ import annotations

import pytest

from text_generation_router.shards.replica import HOLD_SHARE, OrderTiming


def paced(*steps: float, stepping: bool = True) -> OrderTiming:
    timing = OrderTiming()
    for number, step in enumerate(steps):
        timing.update(float(number), step, stepping=stepping)
    return timing


def test_an_idle_replica_gets_its_orders_at_once() -> None:
    assert OrderTiming().hold(0.0) == 0.0
    assert paced(1.0, 1.0, stepping=False).hold(1.0) == 0.0


def test_orders_wait_for_a_share_of_the_step() -> None:
    assert paced(0.1, 0.1).hold(1.0) == pytest.approx(0.1 * HOLD_SHARE)
    assert paced(0.1, 0.1).hold(1.0 + 0.1) == 0.0


def test_the_shorter_of_the_last_two_steps_counts() -> None:
    assert paced(0.1, 5.0).hold(1.0) == pytest.approx(0.1 * HOLD_SHARE)


def test_orders_are_not_held_in_a_step_of_a_millisecond() -> None:
    assert paced(0.001, 0.001).hold(1.0) == 0.0
