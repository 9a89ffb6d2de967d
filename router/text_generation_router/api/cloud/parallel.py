"""Run several jobs at once, all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first failure cancels the other jobs and is raised alone."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(job) for job in jobs]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]
