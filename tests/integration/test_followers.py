"""Shard processes: a follower answers health and Info only; the gateway protocol is served only on request."""

from __future__ import annotations

import tempfile
from pathlib import Path

import grpc
import pytest
from shard_process import shard

from text_generation_proto.gateway import trtllm_service_pb2, trtllm_service_pb2_grpc


async def gateway_health(address: str) -> str | grpc.StatusCode:
    """Return the gateway service's health, or the status of the failed call."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = trtllm_service_pb2_grpc.TrtllmServiceStub(channel)
        try:
            return (await stub.HealthCheck(trtllm_service_pb2.HealthCheckRequest())).status
        except grpc.aio.AioRpcError as error:
            return error.code()


async def test_a_follower_refuses_everything_but_info_and_health() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        address = f"unix://{folder}/shard"
        rank = ("--rank=1", "--world-size=2", f"--group-address=unix://{Path(folder, 'group')}", "--gateway")
        async with shard(address, *rank) as (client, _):
            info = await client.info()
            assert (info.rank, info.world_size) == (1, 2)
            for call in (client.warm_up, client.run().read):
                with pytest.raises(grpc.aio.AioRpcError, match="rank 1 follows: call rank 0") as refused:
                    await call()
                assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert await gateway_health(address) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(("flags", "health"), [((), grpc.StatusCode.UNIMPLEMENTED), (("--gateway",), "OK")])
async def test_the_gateway_protocol_is_off_by_default(flags: tuple[str, ...], health: str | grpc.StatusCode) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        address = f"unix://{folder}/shard"
        async with shard(address, "--echo-self-scheduling", *flags):
            assert await gateway_health(address) == health
