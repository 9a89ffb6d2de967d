from __future__ import annotations

import asyncio
import signal

import pytest

from text_generation_launcher.stop import HURRY_GRACE, StopSignals


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
