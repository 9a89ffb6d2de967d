"""The rule for a step that does not end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checked_echo import CheckedEcho

from text_generation_common.heartbeat import CHECK_EVERY_S
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import NewSequence, Orders, Stopping, WarmUpLimits
from text_generation_shard.progress import StepMonitor

HANG_TIMEOUT_S = 15.0


@pytest.fixture
def prefilling() -> Iterator[CheckedEcho]:
    """An engine whose last step computed prompt tokens."""
    engine = CheckedEcho.build(ShardConfig(engine="echo"))
    engine.warm_up(WarmUpLimits())
    engine.apply(Orders(1, placements=(NewSequence(0, (1, 2, 3), Stopping(5), blocks=(0,)),), prefill=((0, 3),)))
    engine.step()
    assert engine.prefilling == 3
    yield engine
    engine.close()


@pytest.fixture
def decoding(prefilling: CheckedEcho) -> CheckedEcho:
    prefilling.step()
    assert prefilling.prefilling == 0
    return prefilling


def overdue_after(monitor: StepMonitor, engine: CheckedEcho, hang_timeout_s: float = HANG_TIMEOUT_S) -> float | None:
    """Return the seconds after which the step in progress is overdue; None: not within two hours."""
    for check in range(int(7200 / CHECK_EVERY_S)):
        if monitor.check(engine, hang_timeout_s):
            return check * CHECK_EVERY_S
    return None


def test_a_step_is_overdue_after_the_hang_timeout(decoding: CheckedEcho) -> None:
    monitor = StepMonitor()
    assert overdue_after(monitor, decoding) is None, "no step has begun"
    monitor.begin()
    assert overdue_after(monitor, decoding) == 14.0
    assert overdue_after(monitor, decoding, hang_timeout_s=0.0) is None
    monitor.begin()
    assert overdue_after(monitor, decoding, hang_timeout_s=2.0) == 1.0
    monitor.idle()
    assert overdue_after(monitor, decoding) is None


def test_a_prompt_token_has_the_time_of_a_decode_step(prefilling: CheckedEcho) -> None:
    monitor = StepMonitor()
    monitor.begin()
    assert overdue_after(monitor, prefilling) == 614.0, "ten minutes more: the time of a decode step is not known"
    monitor.decoded(3.0)
    monitor.begin()
    assert overdue_after(monitor, prefilling) == 59.0 + 3 * 3.0
    monitor.decoded(250.0)
    monitor.begin()
    assert overdue_after(monitor, prefilling) == 20 * 250.0 + 600.0 - 1.0


def test_slow_decode_steps_have_time_for_twenty_of_the_longest(decoding: CheckedEcho) -> None:
    monitor = StepMonitor()
    monitor.decoded(3.0)
    monitor.begin()
    assert overdue_after(monitor, decoding) == 59.0
    for _ in range(500):
        monitor.decoded(0.01)
    monitor.begin()
    assert overdue_after(monitor, decoding) == 14.0
