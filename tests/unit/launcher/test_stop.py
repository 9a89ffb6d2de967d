from __future__ import annotations

import asyncio
import signal

import pytest

from text_generation_launcher.stop import HURRY_GRACE, VAIN_REMINDER, StopSignals


async def test_the_first_signal_asks_and_leaves_all_patience() -> None:
    stop, reminded = StopSignals(), []
    async with stop.patience(60.0, lambda: reminded.append(1)):
        stop.receive(signal.SIGTERM)
        assert stop.requested.is_set()
    assert reminded == []


async def impatient(stop: StopSignals, seconds: float, reminded: list[int]) -> None:
    """Two signals, and one more, come while somebody waits for ever."""
    async with stop.patience(seconds, lambda: reminded.append(1)):
        for _ in range(3):
            stop.receive(signal.SIGTERM)
        await asyncio.Event().wait()


async def test_the_second_signal_cuts_patience_short_and_reminds_once() -> None:
    reminded: list[int] = []
    begin = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await impatient(StopSignals(), 60.0, reminded)
    assert HURRY_GRACE - 0.1 <= asyncio.get_running_loop().time() - begin < HURRY_GRACE + 10
    assert reminded == [1]


async def test_a_hurry_never_lengthens_patience() -> None:
    begin = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await impatient(StopSignals(), 0.05, [])
    assert asyncio.get_running_loop().time() - begin < HURRY_GRACE


async def test_where_nothing_is_left_to_wait_for_patience_is_short_and_reminds() -> None:
    stop, reminded = StopSignals(), asyncio.Event()
    stop.expect_nothing()
    begin = asyncio.get_running_loop().time()
    async with stop.patience(60.0, reminded.set):
        await reminded.wait()
    assert asyncio.get_running_loop().time() - begin >= VAIN_REMINDER - 0.1
    assert not stop.requested.is_set(), "nobody asked: the exit code says what happened"


async def test_where_nothing_is_left_to_wait_for_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text_generation_launcher.stop.VAIN_GRACE", 0.05)
    stop = StopSignals()
    stop.expect_nothing()
    with pytest.raises(TimeoutError):
        async with stop.patience(60.0, lambda: None):
            await asyncio.Event().wait()


async def test_who_ends_in_time_is_not_reminded() -> None:
    stop, reminded = StopSignals(), []
    stop.expect_nothing()
    async with stop.patience(60.0, lambda: reminded.append(1)):
        pass
    ran_on = asyncio.Event()
    asyncio.get_running_loop().call_later(VAIN_REMINDER + 0.1, ran_on.set)
    await ran_on.wait()
    assert reminded == []
