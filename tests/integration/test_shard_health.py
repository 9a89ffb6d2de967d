"""Probes of a shard on its plain port, and the drain of a shard that stops."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from certificates import tls_arguments, write_certificates
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import free_port
from shard_process import report, running, shard
from shard_session import SessionClosed, open_session

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.v1 import shard_pb2_grpc

SLOW = ("--echo-step-ms=10", "--drain-timeout=30")


async def states(health: health_pb2_grpc.HealthAsyncStub) -> tuple[bool, bool]:
    """Return whether the services "" and driven are SERVING."""
    serving = []
    for name in ("", "driven"):
        reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
        serving.append(reply.status == health_pb2.HealthCheckResponse.SERVING)
    return serving[0], serving[1]


async def until(health: health_pb2_grpc.HealthAsyncStub, wanted: tuple[bool, bool]) -> None:
    async with asyncio.timeout(20):
        while await states(health) != wanted:  # noqa: ASYNC110 - probes ask, too
            await asyncio.sleep(0.01)


async def test_probes_need_neither_certificate_nor_token_and_see_whether_a_router_drives(tmp_path: Path) -> None:
    access = await asyncio.to_thread(write_certificates, tmp_path / "tls", token="open-sesame")
    port = free_port()
    flags = (*SLOW, *tls_arguments(access), f"--health-port={port}")
    async with (
        shard(f"127.0.0.1:{free_port()}", *flags, access=access) as (client, process),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        health: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await shard_pb2_grpc.ShardStub(channel).Info(pb.InfoRequest())
        pool = await client.warm_up()
        for _ in range(2):
            assert await states(health) == (True, False)
            async with open_session(client, pool) as session:
                await until(health, (True, True))
            await until(health, (True, False))
        async with open_session(client, pool) as session:
            tokens = session.generate([1, 2], max_new_tokens=60)
            first = [await anext(tokens)]
            process.terminate()
            await until(health, (False, False))
            rest = [token async for token in tokens]
            assert len(first + rest) == 60
            assert await process.wait() == 0  # though its client keeps the session


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_drain_ends_after_its_time_or_a_second_signal(tmp_path: Path, signals: int) -> None:
    timeout = "1" if signals == 1 else "60"
    async with shard(f"unix://{tmp_path}/s", "--echo-step-ms=10", "--drain-timeout", timeout) as (client, process):
        async with open_session(client, await client.warm_up()) as session:
            tokens = session.generate([1, 2], max_new_tokens=10_000)
            await anext(tokens)
            began = asyncio.get_running_loop().time()
            process.terminate()
            for _ in range(20):
                await anext(tokens)
            if signals == 2:
                process.terminate()
            with pytest.raises(SessionClosed):
                async for _ in tokens:
                    pass
        assert await process.wait() == 0
        assert asyncio.get_running_loop().time() - began < 10


async def test_a_shard_that_stops_lets_its_router_end_the_session(tmp_path: Path) -> None:
    """A router that wrote to a closed socket could not tell the stop from a crash."""
    async with shard(f"unix://{tmp_path}/s") as (client, process):
        await client.warm_up()
        async with running(client) as call:
            await client.opened(call)
            process.terminate()
            assert (await report(call)).closing
            await call.write(pb.Orders(number=1))
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            assert await process.wait() == 0
