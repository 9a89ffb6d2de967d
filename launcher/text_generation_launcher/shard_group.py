"""The shards of one replica: start them together, wait until they serve, end all when one ends.

    one ends by itself ──► the others have FAREWELL seconds to notice and end ──► SIGTERM ──► BROKEN_GRACE ──► SIGKILL

The rest of a broken group may wait in a GPU collective for the dead rank for ever, so it gets less time than a shard
that is stopped. A replica with one shard is a group of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ShardSpec
from text_generation_launcher.shutdown import GracePeriod
from text_generation_proto.channel import CLIENT_OPTIONS, open_channel
from text_generation_proto.exit_codes import ExitCode
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.v1 import shard_pb2_grpc

FAREWELL = 1.5
"""Seconds in which the other shards should notice that the group is broken. They then log the reason and exit."""
BROKEN_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for shards that have not noticed."""
HEALTH_RETRY_INTERVAL = 0.05
CERTIFICATE_RETRY_INTERVAL = 1.0

_OPTIONS = tuple((dict(CLIENT_OPTIONS) | {"grpc.max_reconnect_backoff_ms": 100}).items())  # start-up waits for this
_DISCONNECTED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""Statuses of a health watch whose server was killed, is stopping or has too many calls; which one depends on the moment."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RankExit:
    """The exit of one shard of a group."""

    rank: int
    code: int


async def run_group(specs: Sequence[ShardSpec], grace_period: GracePeriod, *, json_output: bool) -> RankExit:
    """Run the shards until one ends by itself and all have ended; return the exit that broke the group.

    When cancelled, stop them all first.
    """
    exits: list[RankExit] = []
    broken = False
    hung = asyncio.Event()  # a rank that hangs may wait for another one: the stacks of all are needed

    def group_grace_period(seconds: float, terminate: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return grace_period(min(seconds, BROKEN_GRACE) if broken else seconds, terminate)

    async def run(spec: ShardSpec) -> None:
        try:
            code = await run_to_end(spec, group_grace_period, json_output=json_output, hung=hung)
        except OSError as error:  # no memory or file descriptors for another process, perhaps only now
            log.error("shard cannot be started", replica=spec.replica, rank=spec.rank, reason=str(error))
            code = ExitCode.FAILED
        exits.append(RankExit(spec.rank, code))

    async with asyncio.TaskGroup() as tasks:
        members = [tasks.create_task(run(spec)) for spec in specs]
        await asyncio.wait(members, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(members, timeout=FAREWELL)
        broken = True
        for member in members:
            member.cancel()
    return root_cause(exits)


def root_cause(exits: Sequence[RankExit]) -> RankExit:
    """Return the first exit that is not the consequence of another: a shard that loses a peer exits with BUG."""
    return next((exit_ for exit_ in exits if exit_.code != ExitCode.BUG), exits[0])


async def wait_until_serving(shard: ShardSpec) -> pb.InfoResponse:
    """Return the shard's description of itself once its health service reports SERVING."""
    request = health_pb2.HealthCheckRequest(service="")
    while True:
        try:
            async with open_channel(shard.address, shard.access, _OPTIONS) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                # Waits until the shard listens, then for changes of its health.
                async for answer in health.Watch(request, wait_for_ready=True, metadata=shard.access.metadata):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        stub: shard_pb2_grpc.ShardAsyncStub = shard_pb2_grpc.ShardStub(channel)
                        return await stub.Info(pb.InfoRequest(), metadata=shard.access.metadata)
        except OSError as error:
            log.error("the certificates for the shards cannot be read", reason=str(error))
            await asyncio.sleep(CERTIFICATE_RETRY_INTERVAL)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _DISCONNECTED:
                raise
        await asyncio.sleep(HEALTH_RETRY_INTERVAL)
