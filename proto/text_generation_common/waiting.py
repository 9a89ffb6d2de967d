"""Waits: for the first of several events, for a stop signal, for a condition that lasts; and work beside a wait."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from text_generation_common.stop_signals import StopSignals

T = TypeVar("T")


async def first_of(*awaitables: Awaitable[object], timeout_s: float | None = None) -> None:
    """Wait until one of the awaitables is done, for `timeout_s` at most; cancel the others."""

    async def wait(awaitable: Awaitable[object]) -> None:
        await awaitable

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(wait(each)) for each in awaitables]
        await asyncio.wait(started, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in started:
            task.cancel()


async def unless_stopped(work: Coroutine[None, None, T], signals: StopSignals) -> T | None:
    """Return the result of `work`. A stop signal cancels it: None."""
    async with asyncio.TaskGroup() as tasks:
        working, stopping = tasks.create_task(work), tasks.create_task(signals.stop.wait())
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        stopping.cancel()
    return None if working.cancelled() else working.result()


@asynccontextmanager
async def background(*work: Coroutine[None, None, object]) -> AsyncIterator[None]:
    """Run coroutines inside the block, and cancel them at its end. An error of one ends the block."""
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(each) for each in work]
        yield
        for task in started:
            task.cancel()


async def holds_for(seconds: float, holds: Callable[[], bool]) -> None:
    """Wait until a condition has held for `seconds`."""
    since = time.monotonic()
    while time.monotonic() - since < seconds:
        await asyncio.sleep(seconds / 10)
        if not holds():
            since = time.monotonic()
