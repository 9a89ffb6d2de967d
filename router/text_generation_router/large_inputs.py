"""A thread for work on large inputs, so that the event loop goes on.

One thread: two would take the interpreter's lock from each other, and the event loop would wait for both. Work that runs
here should call Python code every few milliseconds, because the lock changes hands only there.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_thread = ThreadPoolExecutor(1, thread_name_prefix="large-inputs")


async def run_in_thread_if_large(work: Callable[[], T], *, large: bool) -> T:
    """Return the result of `work`, done on the thread if its input is `large`. Raises what it raises."""
    if not large:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)
