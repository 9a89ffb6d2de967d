from __future__ import annotations

import asyncio
import signal

import pytest

from text_generation_launcher import shutdown
from text_generation_launcher.shutdown import GracefulShutdown

GRACE = 0.2


@pytest.fixture(autouse=True)
def _short_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCED_GRACE", "LOST_GRACE", "LOST_SECOND_SIGNAL"):
        monkeypatch.setattr(shutdown, name, GRACE)


async def seconds_until_timeout(stop: GracefulShutdown, grace: float, signals: int, terminated: list[int]) -> float:
    """Receive signals at the start of a grace period and return the seconds until it has ended."""
    begin = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        async with stop.grace_period(grace, lambda: terminated.append(1)):
            for _ in range(signals):
                stop.receive(signal.SIGTERM)
            await asyncio.Event().wait()
    return asyncio.get_running_loop().time() - begin


async def test_first_signal_keeps_the_grace_period() -> None:
    stop, terminated = GracefulShutdown(), []
    assert await seconds_until_timeout(stop, 2 * GRACE, 1, terminated) > 1.9 * GRACE
    assert stop.requested.is_set()
    assert terminated == []


async def test_second_signal_shortens_the_grace_period_and_terminates_once() -> None:
    stop, terminated = GracefulShutdown(), []
    assert 0.9 * GRACE < await seconds_until_timeout(stop, 60.0, 3, terminated) < 10
    assert terminated == [1]
    # Also a grace period that begins afterwards.
    assert await seconds_until_timeout(stop, 60.0, 0, terminated) < 10
    assert terminated == [1]


async def test_second_signal_does_not_lengthen_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "FORCED_GRACE", 60.0)
    assert await seconds_until_timeout(GracefulShutdown(), 0.01, 3, []) < 10


async def test_without_shards_the_grace_period_is_short_and_sigterm_is_sent_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutdown, "LOST_GRACE", 2 * GRACE)
    stop, terminated = GracefulShutdown(), []
    stop.requests_lost()
    assert 1.9 * GRACE < await seconds_until_timeout(stop, 60.0, 0, terminated) < 10
    assert terminated == [1]
    assert not stop.requested.is_set(), "no stop was requested"


async def test_child_that_ends_in_time_gets_no_second_signal() -> None:
    stop, terminated = GracefulShutdown(), []
    stop.requests_lost()
    async with stop.grace_period(60.0, lambda: terminated.append(1)):
        pass
    ran_on = asyncio.Event()
    asyncio.get_running_loop().call_later(GRACE + 0.1, ran_on.set)
    await ran_on.wait()
    assert terminated == []


async def test_ignored_signals_stay_ignored() -> None:
    loop = asyncio.get_running_loop()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        GracefulShutdown().listen()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert loop.remove_signal_handler(signal.SIGTERM)
        assert loop.remove_signal_handler(signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)
