"""An asyncio client for a shard, for the router and for direct use.

    async with ShardClient.connect("unix:///tmp/text-generation-server-0") as shard:
        print(await shard.info())
        pool = await shard.warm_up()
        async with shard.session(pool) as session:
            async for token in session.generate([1, 2, 3], max_new_tokens=8):
                print(token.id, token.logprob)

`ShardClient.run` is the plain stream of shard.proto, for a scheduler of your own. `Session` is a small scheduler: it assigns
each sequence the KV blocks for its maximum length and prefills whole prompts, so it never preempts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from text_generation_proto.access import ShardAccess
from text_generation_proto.channel import SESSION_OPEN, open_channel
from text_generation_proto.parts import BadParts, Joiner, split
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.v1 import shard_pb2_grpc

RECONNECT_S = 30.0
"""Seconds of waiting for a shard after which certificates are read again."""

OPENS_WITHIN_S = 3.0
"""Seconds after which a session that is not refused counts as open."""

RunCall = grpc.aio.StreamStreamCall[pb.Orders, pb.StepReport]


class SequenceFailed(Exception):
    """The shard ended the sequence with an error."""


class SessionClosed(Exception):
    """The shard's stream ended while sequences were open."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One new token; `finish_reason` (a value of pb.FinishReason) is set on the last."""

    id: int
    logprob: float
    finish_reason: int | None = None


class ShardClient:
    """A client of one shard. Errors are grpc.aio.AioRpcError with the codes named in shard.proto."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._metadata = metadata
        self._reconnect: Callable[[], Awaitable[None]] | None = None
        """Uses a new channel, with the certificates of now."""
        self._use(channel)

    def _use(self, channel: grpc.aio.Channel) -> None:
        self._health: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(channel)
        self._stub: shard_pb2_grpc.ShardAsyncStub = shard_pb2_grpc.ShardStub(channel)

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: str, access: ShardAccess | None = None) -> AsyncIterator[ShardClient]:
        """Open a channel to `address` (unix:///path or host:port). Connects on first use.

        Token and certificates are those of `access`, else of the environment: SHARD_TOKEN, SHARD_TLS_CERT, ….
        """
        access = access or ShardAccess()
        async with AsyncExitStack() as channels:
            client = cls(await channels.enter_async_context(open_channel(address, access)), access.metadata)

            async def reconnect() -> None:
                await channels.aclose()
                client._use(await channels.enter_async_context(open_channel(address, access)))

            client._reconnect = reconnect
            yield client

    async def ready(self, timeout: float) -> None:
        """Return once the shard's health is SERVING; TimeoutError after `timeout` seconds. A wrong token is an error at once.

        Certificates that are replaced meanwhile are used: raises OSError if one cannot be read.
        """
        request = health_pb2.HealthCheckRequest()
        async with asyncio.timeout(timeout):
            while True:
                try:
                    async for reply in self._health.Watch(
                        request, wait_for_ready=True, timeout=RECONNECT_S, metadata=self._metadata
                    ):
                        if reply.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                        raise
                    # The connection was lost; wait_for_ready waits for the next one.
                    await asyncio.sleep(0.1)
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self._reconnect is not None:
                        await self._reconnect()

    async def is_serving(self) -> bool:
        """Return True if the shard's health is SERVING. Waits for the answer of a shard that hangs."""
        reply = await self._health.Check(health_pb2.HealthCheckRequest(), metadata=self._metadata)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def info(self, timeout: float = 10.0) -> pb.InfoResponse:
        """Return the description of the engine."""
        return await self._stub.Info(pb.InfoRequest(), timeout=timeout, metadata=self._metadata)

    async def warm_up(
        self,
        *,
        max_batch_prefill_tokens: int = 0,
        max_batch_size: int = 0,
        max_batch_total_tokens: int = 0,
        timeout: float = 600.0,
    ) -> pb.WarmUpResponse:
        """Warm the engine up and allocate the KV pool; zeros leave sizes to the engine."""
        request = pb.WarmUpRequest(
            max_batch_prefill_tokens=max_batch_prefill_tokens,
            max_batch_size=max_batch_size,
            max_batch_total_tokens=max_batch_total_tokens,
        )
        return await self._stub.WarmUp(request, timeout=timeout, metadata=self._metadata)

    def run(self) -> RunCall:
        """Open the plain stream: write Orders, read StepReports. A shard serves one at a time."""
        call: RunCall = self._stub.Run(metadata=self._metadata)
        return call

    async def opened(self, call: RunCall) -> None:
        """Return once the session of `call` is open. Raises AioRpcError if it is refused.

        A shard of an older version does not say that it is open, but refuses at once.
        """
        try:
            async with asyncio.timeout(OPENS_WITHIN_S):
                metadata = await call.initial_metadata()
        except TimeoutError:
            return
        if not any(pair in SESSION_OPEN for pair in metadata):
            # A refusal: its status follows, if it is not there already.
            raise grpc.aio.AioRpcError(
                await call.code(),
                initial_metadata=metadata,
                trailing_metadata=await call.trailing_metadata(),
                details=await call.details(),
            )

    @asynccontextmanager
    async def session(self, pool: pb.WarmUpResponse, max_slots: int = 16) -> AsyncIterator[Session]:
        """Open a session over `pool`, the result of `warm_up`. At most `max_slots` sequences run at once; others wait."""
        call = self.run()
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


@dataclass(slots=True, eq=False)
class _Open:
    slot: int
    blocks: list[int]
    tokens: asyncio.Queue[GeneratedToken | Exception] = field(default_factory=asyncio.Queue)
    released_by: int = 0


class Session:
    """Runs sequences on one Run stream, each until its end or until its iterator is closed."""

    def __init__(self, call: RunCall, pool: pb.WarmUpResponse, max_slots: int) -> None:
        self._call = call
        self._block_size = pool.block_size
        self._num_blocks = pool.num_blocks
        self._free_blocks = list(range(pool.num_blocks))
        self._free_slots = list(range(max_slots))
        self._open: dict[int, _Open] = {}
        self._number = 0
        self._freed = asyncio.Condition()
        self._sending = asyncio.Lock()
        self._closed: Exception | None = None

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: pb.Sampling | None = None,
        eos_token_ids: Sequence[int] = (),
        grammar: pb.Grammar | None = None,
    ) -> AsyncIterator[GeneratedToken]:
        """Yield the tokens that follow `prompt`: greedy by default, constrained by `grammar` if given.

        Waits for a slot and blocks. Raises ValueError if the pool is too small for it, SequenceFailed, SessionClosed.
        Closing the iterator early (`aclose`, or leaving the function that loops) releases the sequence.
        """
        needed = -(-(len(prompt) + max_new_tokens - 1) // self._block_size)
        if needed > self._num_blocks:
            raise ValueError(f"the sequence needs {needed} KV blocks, the pool has {self._num_blocks}")
        async with self._freed:
            await self._freed.wait_for(lambda: self._closed or (self._free_slots and len(self._free_blocks) >= needed))
            if self._closed:
                raise SessionClosed("the session is closed") from self._closed
            sequence = _Open(self._free_slots.pop(), [self._free_blocks.pop() for _ in range(needed)])
            self._open[sequence.slot] = sequence
        admission = pb.NewSequence(
            slot=sequence.slot,
            prompt=prompt,
            blocks=sequence.blocks,
            sampling=sampling or pb.Sampling(greedy=True),
            stopping=pb.Stopping(max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids),
            grammar=grammar,
        )
        try:
            await self._send(pb.Orders(admit=[admission], prefill_slots=[sequence.slot], prefill_tokens=[len(prompt)]))
            while True:
                token = await sequence.tokens.get()
                if isinstance(token, Exception):
                    raise token
                yield token
                if token.finish_reason is not None:
                    return
        finally:
            if self._open.get(sequence.slot) is sequence and not self._closed:
                await self._send(pb.Orders(release=[sequence.slot]), releases=sequence)

    async def receive(self) -> None:
        """Read reports until the stream ends; `ShardClient.session` runs this."""
        parts = Joiner[pb.StepReport](sys.maxsize)
        try:
            while True:
                read = await self._call.read()
                if not isinstance(read, pb.StepReport) or read.closing:
                    raise SessionClosed("the shard closed its stream")
                if (report := parts.join(read)) is not None:
                    await self._handle(report)
        except (grpc.aio.AioRpcError, SessionClosed, BadParts) as error:
            self._closed = error
            for sequence in self._open.values():
                sequence.tokens.put_nowait(SessionClosed(str(error)))
        finally:
            self._closed = self._closed or SessionClosed("the session is over")
            async with self._freed:
                self._freed.notify_all()

    async def _send(self, orders: pb.Orders, releases: _Open | None = None) -> None:
        async with self._sending:
            self._number += 1
            orders.number = self._number
            if releases is not None:
                releases.released_by = self._number
            for part in split(orders):
                await self._call.write(part)

    async def _handle(self, report: pb.StepReport) -> None:
        reasons = {finish.slot: finish.reason for finish in report.finished}
        counts = report.token_counts or [1] * len(report.slots)
        at = 0
        for slot, count in zip(report.slots, counts, strict=True):
            for position in range(at, at + count):
                last = position == at + count - 1
                token = GeneratedToken(
                    report.token_ids[position], report.logprobs[position], reasons.get(slot) if last else None
                )
                if sequence := self._open.get(slot):
                    sequence.tokens.put_nowait(token)
            at += count
        for failure in report.failed:
            if sequence := self._open.get(failure.slot):
                sequence.tokens.put_nowait(SequenceFailed(failure.message))
        gone = [self._open[slot] for slot in (*reasons, *(f.slot for f in report.failed)) if slot in self._open]
        gone += [s for s in self._open.values() if 0 < s.released_by <= report.orders_applied and s not in gone]
        if gone:
            async with self._freed:
                for sequence in gone:
                    del self._open[sequence.slot]
                    self._free_slots.append(sequence.slot)
                    self._free_blocks += sequence.blocks
                self._freed.notify_all()
