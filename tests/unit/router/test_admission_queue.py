"""Turns before the queue: fairness between tenants, a worker for those who come later, and bounds."""

from __future__ import annotations

import asyncio

import pytest
from sandbox_state import waiting_claims

from text_generation_router import admission_queue
from text_generation_router.admission_queue import (
    MIN_CHARACTERS,
    SHORT_CHARACTERS,
    Claim,
    PendingWork,
    WorkerQueue,
)
from text_generation_router.errors import CannotKeepUp, Overloaded
from text_generation_router.request import DEFAULT_TENANT, TenantId

NOISY, QUIET, OTHER = TenantId("noisy"), TenantId("quiet"), TenantId("other")
LONG = SHORT_CHARACTERS + 1


class Log:
    """Takes turns in tasks and notes their order."""

    def __init__(self, queue: WorkerQueue, tasks: asyncio.TaskGroup) -> None:
        self.served: list[str] = []
        self._queue = queue
        self._tasks = tasks

    def take(self, tenant: TenantId, characters: int) -> asyncio.Task[None]:
        async def turn() -> None:
            taken = await self._queue.take(tenant, characters)
            self.served.append(tenant)
            self._queue.give_back(taken)

        return self._tasks.create_task(turn())


async def test_the_next_turn_is_of_the_tenant_that_was_served_least() -> None:
    queue = WorkerQueue(PendingWork(), 1)
    running = await queue.take(NOISY, LONG)
    async with asyncio.TaskGroup() as tasks:
        log = Log(queue, tasks)
        for _ in range(3):
            log.take(NOISY, LONG)
        await asyncio.sleep(0)
        for _ in range(4):
            log.take(QUIET, MIN_CHARACTERS)
        await asyncio.sleep(0)
        queue.give_back(running)
    assert log.served == [NOISY, *[QUIET] * 4, NOISY, NOISY]


@pytest.mark.parametrize(
    ("tenant", "characters", "most", "only_long"),
    [
        (QUIET, MIN_CHARACTERS, 3, False),
        (QUIET, LONG, 2, False),
        (NOISY, MIN_CHARACTERS, 2, False),
        (QUIET, LONG, 3, True),
        (NOISY, LONG, 2, True),
    ],
    ids=["the only tenant", "long work", "one of several tenants", "all work is long", "long work of several tenants"],
)
async def test_a_worker_is_kept_for_those_who_come_later(
    tenant: TenantId, characters: int, most: int, *, only_long: bool
) -> None:
    queue = WorkerQueue(PendingWork(), 3, only_long=only_long)
    queue.give_back(await queue.take(QUIET, MIN_CHARACTERS))
    async with asyncio.TaskGroup() as tasks:
        taken = [tasks.create_task(queue.take(tenant, characters)) for _ in range(4)]
        await asyncio.sleep(0)
        assert sum(task.done() for task in taken) == most
        if most < 3:
            queue.give_back(await queue.take(QUIET, MIN_CHARACTERS))
        for task in taken:
            queue.give_back(await task)
    assert waiting_claims(queue) == 0


async def test_what_waits_is_bounded_in_all_and_by_tenant() -> None:
    stage = PendingWork(10 * MIN_CHARACTERS)
    queue = WorkerQueue(stage, 1)
    running = await queue.take(OTHER, 1)
    fourth, fifth = TenantId("fourth"), TenantId("fifth")
    async with asyncio.TaskGroup() as tasks:

        async def wait(tenant: TenantId, units: int) -> asyncio.Task[Claim]:
            task = tasks.create_task(queue.take(tenant, units * MIN_CHARACTERS))
            await asyncio.sleep(0)
            return task

        waiting = [await wait(NOISY, 6), await wait(NOISY, 4)]
        with pytest.raises(Overloaded) as refusal:
            await queue.take(NOISY, 1)
        assert refusal.value.retry_after is not None
        waiting.append(await wait(QUIET, 5))  # its share
        with pytest.raises(Overloaded):
            await queue.take(QUIET, 1)
        waiting += [await wait(OTHER, 3), await wait(fourth, 2)]
        with pytest.raises(CannotKeepUp) as failure:
            await queue.take(fifth, MIN_CHARACTERS)
        assert failure.value.status == 503
        assert failure.value.retry_after is not None
        for task in waiting:
            task.cancel()
    queue.give_back(running)
    assert (stage.waiting, waiting_claims(queue)) == (0, 0)


async def test_a_wait_that_is_too_long_is_the_servers_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_queue, "MAX_WAIT_S", 0.01)
    stage = PendingWork()
    queue = WorkerQueue(stage, 1)
    running = await queue.take(NOISY, 1)
    with pytest.raises(CannotKeepUp):
        await queue.take(QUIET, 1)
    assert (stage.waiting, waiting_claims(queue)) == (0, 0)
    queue.give_back(running)
    queue.give_back(await queue.take(QUIET, 1))


async def test_a_turn_that_is_granted_to_a_cancelled_caller_goes_to_the_next() -> None:
    queue = WorkerQueue(PendingWork(), 1)
    running = await queue.take(DEFAULT_TENANT, 1)
    async with asyncio.TaskGroup() as tasks:
        first, second = (tasks.create_task(queue.take(DEFAULT_TENANT, 1)) for _ in range(2))
        await asyncio.sleep(0)
        queue.give_back(running)
        first.cancel()
        queue.give_back(await second)
    assert first.cancelled()
    queue.give_back(await queue.take(DEFAULT_TENANT, 1))
