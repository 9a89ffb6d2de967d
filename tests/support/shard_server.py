"""Shards and clusters in the test's own process, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health, health_pb2_grpc

from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2_grpc
from text_generation_router.shards.cluster import Cluster
from text_generation_router.worker_link.remote_cluster import RemoteCluster
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.guard import create_server
from text_generation_shard.health import ShardHealth
from text_generation_shard.servicer import ShardServicer
from text_generation_shard.session import SessionOwner


@dataclass(frozen=True, slots=True)
class ServedShard:
    """A shard in this process."""

    client: ShardClient
    end_session: Callable[[], None]
    """Ends the open session, as a crash would."""
    fail: Callable[[str], None]
    """Reports a fault of a GPU."""
    drain: Callable[[], Coroutine[None, None, None]]
    """Asks the router to leave, as a shard that stops does."""
    health: health.aio.HealthServicer


@asynccontextmanager
async def serve_engine(
    engine: Engine,
    address: str,
    servicer: type[ShardServicer] = ShardServicer,
    config: ShardConfig | None = None,
) -> AsyncIterator[ServedShard]:
    """Serve `engine` at `address`."""
    thread = ThreadPoolExecutor(max_workers=1)
    owner = SessionOwner(thread)
    owner.serve(engine)
    server = create_server()
    shard_health = ShardHealth()
    await shard_health.set_serving(serving=True)
    shard_pb2_grpc.add_ShardServicer_to_server(servicer(owner, shard_health, config or ShardConfig()), server)
    health_pb2_grpc.add_HealthServicer_to_server(shard_health.servicer, server)

    async def drain() -> None:
        await shard_health.stop()
        owner.drain()

    server.add_insecure_port(address)
    await server.start()
    try:
        async with ShardClient.connect(address) as client:
            yield ServedShard(client, owner.end_session, owner.fail, drain, shard_health.servicer)
    finally:
        owner.end_session()
        await server.stop(grace=1)
        thread.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def running(
    cluster: Cluster[Any] | RemoteCluster, run: Callable[[], Coroutine[None, None, None]]
) -> AsyncIterator[None]:
    """Run `cluster` while the block lasts."""
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run())
        try:
            await cluster.opened()
            yield
        except BaseException as error:  # noqa: BLE001 - raised again below: the group would wrap it in a group
            failure = error
        task.cancel()
    if failure is not None:
        raise failure
