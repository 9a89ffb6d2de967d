"""Who is ready: a shard by its health service, the router by its health route."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from text_generation_proto.channel import CLIENT_OPTIONS

OPTIONS = tuple((dict(CLIENT_OPTIONS) | {"grpc.max_reconnect_backoff_ms": 100}).items())  # a start waits for this
HEALTH_INTERVAL = 0.05
"""Seconds between two looks at the router. There is no event for "somebody listens on that port now"."""
BROKEN_OFF = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""How a watch ends whose server was killed or is stopping; which of them depends on the moment."""


async def shard_serving(address: str) -> None:
    """Return once the shard at this address says that it serves."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                # Waits until the shard listens, and from then on for its word.
                async for answer in health.Watch(health_pb2.HealthCheckRequest(service=""), wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() not in BROKEN_OFF:
                    raise
            await asyncio.sleep(HEALTH_INTERVAL)


async def router_healthy(url: str) -> None:
    """Return once the router answers its health route with 200."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(HEALTH_INTERVAL)
