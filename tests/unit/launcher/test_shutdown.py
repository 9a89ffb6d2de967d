from __future__ import annotations

import asyncio
import signal

import pytest

from text_generation_launcher.shutdown import FORCED_GRACE, NO_SHARD_SECOND_SIGNAL, GracefulShutdown


async def test_the_first_signal_asks_and_leaves_all_patience() -> None:
    stop, reminded = GracefulShutdown(), []
    async with stop.grace_period(60.0, lambda: reminded.append(1)):
        stop.receive(signal.SIGTERM)
        assert stop.requested.is_set()
    assert reminded == []


async def impatient(stop: GracefulShutdown, seconds: float, reminded: list[int]) -> None:
    """Two signals, and one more, come while somebody waits for ever."""
    async with stop.grace_period(seconds, lambda: reminded.append(1)):
        for _ in range(3):
            stop.receive(signal.SIGTERM)
        await asyncio.Event().wait()


async def test_the_second_signal_cuts_patience_short_and_reminds_once() -> None:
    reminded: list[int] = []
    begin = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await impatient(GracefulShutdown(), 60.0, reminded)
    assert FORCED_GRACE - 0.1 <= asyncio.get_running_loop().time() - begin < FORCED_GRACE + 10
    assert reminded == [1]


async def test_a_hurry_never_lengthens_patience() -> None:
    begin = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await impatient(GracefulShutdown(), 0.05, [])
    assert asyncio.get_running_loop().time() - begin < FORCED_GRACE


async def test_where_nothing_is_left_to_wait_for_patience_is_short_and_reminds() -> None:
    stop, reminded = GracefulShutdown(), asyncio.Event()
    stop.shards_lost()
    begin = asyncio.get_running_loop().time()
    async with stop.grace_period(60.0, reminded.set):
        await reminded.wait()
    assert asyncio.get_running_loop().time() - begin >= NO_SHARD_SECOND_SIGNAL - 0.1
    assert not stop.requested.is_set(), "nobody asked: the exit code says what happened"


async def test_where_nothing_is_left_to_wait_for_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text_generation_launcher.shutdown.NO_SHARD_GRACE", 0.05)
    stop = GracefulShutdown()
    stop.shards_lost()
    with pytest.raises(TimeoutError):
        async with stop.grace_period(60.0, lambda: None):
            await asyncio.Event().wait()


async def test_who_ends_in_time_is_not_reminded() -> None:
    stop, reminded = GracefulShutdown(), []
    stop.shards_lost()
    async with stop.grace_period(60.0, lambda: reminded.append(1)):
        pass
    ran_on = asyncio.Event()
    asyncio.get_running_loop().call_later(NO_SHARD_SECOND_SIGNAL + 0.1, ran_on.set)
    await ran_on.wait()
    assert reminded == []
