from __future__ import annotations

import asyncio
import signal

import pytest

from text_generation_launcher.shutdown import FORCED_GRACE, NO_SHARD_SECOND_SIGNAL, GracefulShutdown


async def test_first_signal_keeps_the_grace_period() -> None:
    stop, terminated = GracefulShutdown(), []
    async with stop.grace_period(60.0, lambda: terminated.append(1)):
        stop.receive(signal.SIGTERM)
        assert stop.requested.is_set()
    assert terminated == []


async def three_signals(stop: GracefulShutdown, seconds: float, terminated: list[int]) -> None:
    """Receive three signals while waiting for ever."""
    async with stop.grace_period(seconds, lambda: terminated.append(1)):
        for _ in range(3):
            stop.receive(signal.SIGTERM)
        await asyncio.Event().wait()


async def test_second_signal_shortens_the_grace_period_and_terminates_once() -> None:
    terminated: list[int] = []
    begin = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await three_signals(GracefulShutdown(), 60.0, terminated)
    assert FORCED_GRACE - 0.1 <= asyncio.get_running_loop().time() - begin < FORCED_GRACE + 10
    assert terminated == [1]


async def test_second_signal_does_not_lengthen_the_grace_period() -> None:
    begin = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await three_signals(GracefulShutdown(), 0.05, [])
    assert asyncio.get_running_loop().time() - begin < FORCED_GRACE


async def test_without_shards_sigterm_is_sent_twice() -> None:
    stop, terminated = GracefulShutdown(), asyncio.Event()
    stop.shards_lost()
    begin = asyncio.get_running_loop().time()
    async with stop.grace_period(60.0, terminated.set):
        await terminated.wait()
    assert asyncio.get_running_loop().time() - begin >= NO_SHARD_SECOND_SIGNAL - 0.1
    assert not stop.requested.is_set(), "no stop was requested"


async def test_without_shards_the_grace_period_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text_generation_launcher.shutdown.NO_SHARD_GRACE", 0.05)
    stop = GracefulShutdown()
    stop.shards_lost()
    with pytest.raises(TimeoutError):
        async with stop.grace_period(60.0, lambda: None):
            await asyncio.Event().wait()


async def test_child_that_ends_in_time_gets_no_second_signal() -> None:
    stop, terminated = GracefulShutdown(), []
    stop.shards_lost()
    async with stop.grace_period(60.0, lambda: terminated.append(1)):
        pass
    ran_on = asyncio.Event()
    asyncio.get_running_loop().call_later(NO_SHARD_SECOND_SIGNAL + 0.1, ran_on.set)
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
