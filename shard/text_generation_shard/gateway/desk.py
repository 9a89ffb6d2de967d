"""Desk: lets calls in, opens a session for the first and finds calls by their request id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from text_generation_shard.gateway.call import Call
from text_generation_shard.gateway.errors import CallFailed
from text_generation_shard.gateway.host import HostServicer
from text_generation_shard.gateway.run import Run

MAX_WAITING = 1024
"""Sequences that wait for a slot."""


class Desk:
    """The calls that are being answered. Lives on the event loop."""

    def __init__(self, host: HostServicer, max_waiting: int = MAX_WAITING) -> None:
        self._host = host
        self._max_waiting = max_waiting
        self._calls: dict[Call, Run | None] = {}
        """Those that have come and not left, with the session they are in."""
        self._run: Run | None = None
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def serving(self, call: Call, max_slots: int) -> AsyncIterator[None]:
        """`call` is computed while the block lasts. Raises CallFailed."""
        self._check_room(call, max_slots)
        self._calls[call] = None
        try:
            async with self._opening:
                await self._host.warm_up()
                run = self._calls[call] = await self._open_run(max_slots)
                # What was cancelled while it waited here has nothing left to compute.
                run.add(output for output in call.outputs if not output.is_over)
            yield
        finally:
            self._drop(call)
            del self._calls[call]

    def abort(self, request_id: str) -> bool:
        """End every call of this id with what it has; whether there was one that had not ended."""
        calls = [call for call in self._calls if call.ask.request_id == request_id and not call.is_over]
        for call in calls:
            call.cancel()
            self._drop(call)
        return bool(calls)

    def _check_room(self, call: Call, max_slots: int) -> None:
        """An answer that its reader has not taken yet counts as well: it takes memory."""
        present = sum(len(one.outputs) for one in self._calls)
        if present + len(call.outputs) > max_slots + self._max_waiting:
            raise CallFailed(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{max_slots} sequences run and {self._max_waiting} wait: the shard takes no more",
            )

    async def _open_run(self, max_slots: int) -> Run:
        """The session there is, or a new one."""
        if self._run is None or self._run.over:
            run = Run(max_slots, self._why_over)
            run.begin(await self._host.lend_session(run.tell, run.yield_engine))
            self._run = run
        return self._run

    def _drop(self, call: Call) -> None:
        if (run := self._calls[call]) is not None:
            run.drop(call.outputs)

    def _why_over(self) -> CallFailed:
        return self._host.problem or CallFailed(grpc.StatusCode.UNAVAILABLE, "the session was ended")
