"""Orders leave at once to an idle replica, and late in a step of a busy one."""

from __future__ import annotations

import pytest

from text_generation_router.shards.replica import HOLD_SHARE, OrderTiming


@pytest.mark.parametrize(
    ("steps", "stepping", "now", "held"),
    [
        pytest.param((), True, 0.0, 0.0, id="no step yet"),
        pytest.param((1.0, 1.0), False, 1.0, 0.0, id="idle"),
        pytest.param((0.1, 0.1), True, 1.0, 0.1 * HOLD_SHARE, id="a share of the step"),
        pytest.param((0.1, 0.1), True, 1.1, 0.0, id="the step is over"),
        pytest.param((0.1, 5.0), True, 1.0, 0.1 * HOLD_SHARE, id="the shorter of the last two steps"),
        pytest.param((0.001, 0.001), True, 1.0, 0.0, id="a step of a millisecond"),
    ],
)
def test_orders_are_held(steps: tuple[float, ...], stepping: bool, now: float, held: float) -> None:
    timing = OrderTiming()
    for number, step in enumerate(steps):
        timing.update(float(number), step, stepping=stepping)
    assert timing.hold(now) == pytest.approx(held)
