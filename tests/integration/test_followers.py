"""A shard that follows: it is asked how it is and what it is, and for nothing else."""

from __future__ import annotations

import tempfile
from pathlib import Path

import grpc
import pytest
from shard_process import shard

from text_generation_proto.gateway import trtllm_service_pb2, trtllm_service_pb2_grpc


async def test_a_follower_says_what_it_is_and_sends_others_to_rank_0() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        address = f"unix://{folder}/shard"
        place = ("--rank=1", "--world-size=2", f"--group-address=unix://{Path(folder, 'group')}")
        async with shard(address, *place) as (client, _):  # its health is that of any other shard
            info = await client.info()
            assert (info.rank, info.world_size) == (1, 2)
            with pytest.raises(grpc.aio.AioRpcError, match="rank 1 follows: call rank 0") as refused:
                await client.warm_up()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            with pytest.raises(grpc.aio.AioRpcError, match="rank 1 follows: call rank 0") as refused:
                await client.run().read()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            async with grpc.aio.insecure_channel(address) as channel:
                gateway = trtllm_service_pb2_grpc.TrtllmServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await gateway.HealthCheck(trtllm_service_pb2.HealthCheckRequest())
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
