"""A small scheduler over a shard's Run stream: each sequence gets the KV blocks for its maximum length and whole-prompt steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import grpc

from text_generation_proto.client import RunCall, ShardClient
from text_generation_proto.v1 import shard_pb2 as pb


class SequenceFailed(Exception):
    """The shard ended the sequence with an error."""


class SessionClosed(Exception):
    """The shard's stream ended while sequences were open."""


class Session:
    """Runs sequences on one Run stream, each until its end or until its iterator is closed."""

    def __init__(self, call: RunCall, pool: pb.WarmUpResponse, max_slots: int) -> None:
        self._call = call
        self._block_size = pool.block_size
        self._free_blocks = list(range(pool.num_blocks))
        self._free_slots = list(range(max_slots))
        self._tokens: dict[int, asyncio.Queue[int | Exception | None]] = {}
        """By slot: new tokens, then an error or None at the end."""
        self._number = 0
        self._sending = asyncio.Lock()
        self._is_closed = False

    async def generate(self, prompt: Sequence[int], *, max_new_tokens: int) -> AsyncIterator[int]:
        """Yield the most probable tokens after `prompt`. Raises SequenceFailed, SessionClosed. `aclose` releases the sequence."""
        slot = self._free_slots.pop()
        needed = -(-(len(prompt) + max_new_tokens - 1) // self._block_size)
        blocks = [self._free_blocks.pop() for _ in range(needed)]
        tokens = self._tokens[slot] = asyncio.Queue()
        sequence = pb.NewSequence(
            slot=slot,
            prompt=prompt,
            blocks=blocks,
            sampling=pb.Sampling(greedy=True),
            stopping=pb.Stopping(max_new_tokens=max_new_tokens),
        )
        is_over = False
        try:
            await self._send(pb.Orders(placements=[sequence], prefill_slots=[slot], prefill_tokens=[len(prompt)]))
            while isinstance(token := await tokens.get(), int):
                yield token
            is_over = True
            if token is not None:
                raise token
        finally:
            if not is_over and not self._is_closed:
                await self._send(pb.Orders(release=[slot]))
            self._free_slots.append(slot)
            self._free_blocks += blocks

    async def receive(self) -> None:
        """Read reports until the stream ends."""
        with suppress(grpc.aio.AioRpcError):
            while isinstance(report := await self._call.read(), pb.StepReport) and not report.closing:
                for slot, token in zip(report.slots, report.token_ids, strict=True):
                    self._tokens[slot].put_nowait(token)
                for finish in report.finished:
                    self._tokens[finish.slot].put_nowait(None)
                for failure in report.failed:
                    self._tokens[failure.slot].put_nowait(SequenceFailed(failure.message))
        self._is_closed = True
        for tokens in self._tokens.values():
            tokens.put_nowait(SessionClosed("the shard closed its stream"))

    async def _send(self, orders: pb.Orders) -> None:
        async with self._sending:  # orders arrive in the order of their numbers
            self._number += 1
            orders.number = self._number
            await self._call.write(orders)


@asynccontextmanager
async def open_session(client: ShardClient, pool: pb.WarmUpResponse, max_slots: int = 16) -> AsyncIterator[Session]:
    """Open a session over `pool`, the result of `warm_up`."""
    call = client.run()
    session = Session(call, pool, max_slots)
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            receiver = tasks.create_task(session.receive())
            try:
                yield session
            except BaseException as error:  # noqa: BLE001 - raised again below: the group would wrap it in a group
                failure = error
            receiver.cancel()
    finally:
        call.cancel()
    if failure is not None:
        raise failure
