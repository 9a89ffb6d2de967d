"""An asyncio client for a shard, for the router and for direct use.

async with ShardClient.connect("unix:///tmp/text-generation-server-0") as shard:
    print(await shard.info())
    await shard.warm_up()
    call = shard.run()  # the stream of shard.proto: write Orders, read StepReports
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from text_generation_proto.access import Access, token_metadata
from text_generation_proto.channel import SESSION_OPEN, open_channel
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.v1 import shard_pb2_grpc

RECONNECT_S = 30.0
"""Seconds of waiting for a shard after which certificates are read again."""

LOAD_S = 120.0
"""Time for an adapter to be read or unloaded."""
OPENS_WITHIN_S = 3.0
"""Seconds after which a session that is not refused counts as open."""

RunCall = grpc.aio.StreamStreamCall[pb.Orders, pb.StepReport]


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
    async def connect(cls, address: str, access: Access | None = None) -> "AsyncIterator[ShardClient]":
        """Open a channel to `address` (unix:///path or host:port). Connects on first use.

        Token and certificates are those of `access`; None: neither.
        """
        async with AsyncExitStack() as channels:
            client = cls(await channels.enter_async_context(open_channel(address, access)), token_metadata(access))

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
                    options = {"wait_for_ready": True, "timeout": RECONNECT_S, "metadata": self._metadata}
                    async for reply in self._health.Watch(request, **options):
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
        return await self._stub.Info(pb.InfoRequest(), timeout=timeout, metadata=self._metadata)

    async def warm_up(self, *, timeout: float = 600.0, **limits: int) -> pb.WarmUpResponse:
        """Warm the engine up and allocate the KV pool. `limits`: fields of WarmUpRequest; the engine chooses the others."""
        return await self._stub.WarmUp(pb.WarmUpRequest(**limits), timeout=timeout, metadata=self._metadata)

    async def set_adapter(self, name: str, path: str | None) -> None:
        """Load a LoRA adapter from a folder below the shard's --lora-modules-dir; None: unload it after its last sequence."""
        if path is None:
            unload = pb.UnloadAdapterRequest(name=name)
            await self._stub.UnloadAdapter(unload, timeout=LOAD_S, metadata=self._metadata)
        else:
            load = pb.LoadAdapterRequest(name=name, path=path)
            await self._stub.LoadAdapter(load, timeout=LOAD_S, metadata=self._metadata)

    def run(self) -> RunCall:
        """Open the stream of a session. A shard serves one at a time."""
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
