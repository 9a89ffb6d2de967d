"""Calls of libraries that may never return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def call_in_daemon(function: Callable[[], T], seconds: float) -> T:
    """Return what `function` returns, or raise its error; TimeoutError after so many seconds.

    It runs in a daemon thread: the process can end although the call does not.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            answer.set_exception(error)

    threading.Thread(target=call, name=function.__name__, daemon=True).start()
    async with asyncio.timeout(seconds):
        return await asyncio.wrap_future(answer)
