"""shard.proto, clause by clause, against a real shard process over a real socket."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from ports import free_port
from shard_process import report, running, shard

from text_generation_proto.client import RunCall, ShardClient
from text_generation_proto.v1 import shard_pb2 as pb


def admission(slot: int, prompt: list[int], new: int, blocks: list[int]) -> pb.NewSequence:
    return pb.NewSequence(
        slot=slot,
        prompt=prompt,
        blocks=blocks,
        sampling=pb.Sampling(greedy=True),
        stopping=pb.Stopping(max_new_tokens=new),
    )


def start(number: int, slot: int, prompt: list[int], new: int, blocks: list[int]) -> pb.Orders:
    """Admit one sequence and prefill it whole."""
    return pb.Orders(
        number=number,
        placements=[admission(slot, prompt, new, blocks)],
        prefill_slots=[slot],
        prefill_tokens=[len(prompt)],
    )


async def until_finished(call: RunCall, slot: int) -> list[int]:
    """Return the tokens of a slot up to its finish."""
    tokens: list[int] = []
    while True:
        step = await report(call)
        tokens += [token for at, token in zip(step.slots, step.token_ids, strict=True) if at == slot]
        if slot in [finish.slot for finish in step.finished]:
            return tokens


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ShardClient]:
    async with shard(f"unix://{tmp_path_factory.mktemp('shard')}/s") as (connected, _):
        yield connected


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: ShardClient) -> ShardClient:
    """The client of a shard without a session and with a new pool of 64 blocks."""
    async with asyncio.timeout(10):
        while True:  # the session of the last test ends at the next boundary
            try:
                await served.warm_up(max_batch_total_tokens=32 * 16)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            else:
                break
    await served.warm_up(max_batch_total_tokens=64 * 16)
    return served


async def test_each_set_of_orders_takes_a_boundary_of_its_own(client: ShardClient) -> None:
    async with running(client) as call:
        for number in (1, 2, 3):
            await call.write(start(number, slot=number, prompt=[number], new=20, blocks=[number, 10 + number]))
        applied = [0]
        while applied[-1] < 3:
            applied.append((await report(call)).orders_applied)
        assert all(later - earlier <= 1 for earlier, later in pairwise(applied))


async def test_a_sequence_stops_at_its_grant_and_goes_on_with_the_next(client: ShardClient) -> None:
    async with running(client) as call:
        await call.write(start(1, slot=0, prompt=[1, 2, 3], new=40, blocks=[0]))
        tokens: list[int] = []
        # The block holds 16 positions: the prompt's 3 and 13 tokens' own; the 14th token is known, not computed.
        while len(tokens) < 14:
            tokens += (await report(call)).token_ids
        await call.write(pb.Orders(number=2, allocation_slots=[0], allocation_counts=[2], allocation_blocks=[4, 5]))
        acknowledged = await report(call)
        assert (acknowledged.orders_applied, list(acknowledged.token_ids)) == (2, [])
        assert len(tokens + await until_finished(call, 0)) == 40


async def test_a_bad_sequence_fails_alone(client: ShardClient) -> None:
    async with running(client) as call:
        orders = start(1, slot=0, prompt=[7], new=3, blocks=[0])
        orders.placements.append(admission(1, prompt=[], new=3, blocks=[1]))
        orders.placements.append(admission(2, prompt=[1], new=3, blocks=[10_000]))
        orders.placements.append(admission(5000, prompt=[1], new=3, blocks=[2]))
        orders.placements.append(admission(3, prompt=[1], new=3, blocks=[3]))
        orders.placements[-1].sampling.logit_bias_ids.append(1)  # without its value
        await call.write(orders)
        failed = {failure.slot: failure.code for failure in (await report(call)).failed}
        assert failed == dict.fromkeys((1, 2, 3, 5000), pb.FAILURE_CODE_INVALID)
        assert await until_finished(call, 0) == [7, 7, 7]


@pytest.mark.parametrize(
    "orders",
    [
        pb.Orders(number=1, prefill_slots=[1, 2], prefill_tokens=[1]),
        pb.Orders(number=2),
        pb.Orders(number=1, copies=[pb.Copy(number=1)]),
    ],
    ids=["columns do not match", "not the next number", "no host cache"],
)
async def test_wrong_orders_end_the_session_with_invalid_argument(client: ShardClient, orders: pb.Orders) -> None:
    async with running(client) as call:
        await call.write(orders)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with running(client) as call:
        await call.write(start(1, slot=0, prompt=[7], new=1, blocks=[0]))
        assert await until_finished(call, 0) == [7]


async def test_prompt_logprobs_and_top_tokens_come_with_the_first_token(client: ShardClient) -> None:
    async with running(client) as call:
        orders = start(1, slot=0, prompt=[7, 8, 9], new=1, blocks=[0])
        orders.placements[0].logprobs.CopyFrom(pb.LogprobOptions(top_n=2, prompt=True, prompt_top_n=3))
        await call.write(orders)
        while not (step := await report(call)).slots:
            pass
        assert [len(top.token_ids) for top in step.top_tokens] == [2]
        (scored,) = step.prompt_logprobs
        assert len(scored.logprobs) == 3
        assert list(scored.top_counts) == [0, 3, 3]
        assert list(scored.top_token_ids) == [8, 9, 10, 9, 10, 11]
        assert len(scored.top_logprobs) == 6


async def test_a_second_session_is_refused_while_one_is_open(client: ShardClient) -> None:
    async with running(client) as first, running(client) as second:
        await first.write(start(1, slot=0, prompt=[1], new=1, blocks=[0]))
        await until_finished(first, 0)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await second.read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.warm_up()
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_warm_up_with_the_last_limits_leaves_the_pool_and_the_session_alone(client: ShardClient) -> None:
    async with running(client) as call:
        await call.write(start(1, slot=0, prompt=[1, 2], new=60, blocks=list(range(8))))
        await report(call)
        pool = await client.warm_up(max_batch_total_tokens=64 * 16)
        assert pool.num_blocks == 64
        assert len(await until_finished(call, 0)) >= 50


async def test_a_broken_stream_drops_everything_it_held(client: ShardClient) -> None:
    async with running(client) as call:
        await call.write(start(1, slot=0, prompt=[1], new=1000, blocks=list(range(62))))
        await report(call)
    async with asyncio.timeout(10):
        while True:  # the shard ends the old session at its next boundary
            async with running(client) as call:
                await call.write(start(1, slot=0, prompt=[4], new=2, blocks=[0]))
                try:
                    assert await until_finished(call, 0) == [4, 4]
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                else:
                    return


async def test_run_before_warm_up_and_a_pool_smaller_than_a_block_are_refused(tmp_path: Path) -> None:
    async with shard(f"unix://{tmp_path}/s") as (client, _), running(client) as call:
        for refused, code in (
            (call.read(), grpc.StatusCode.FAILED_PRECONDITION),
            (client.warm_up(max_batch_total_tokens=8), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await refused
            assert error.value.code() is code


async def test_a_second_shard_does_not_take_a_socket_that_is_served(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/s"
    async with shard(address) as (client, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20), shard(address, "--log-level=error") as (_, second):
                assert await second.wait() == 1
                raise TimeoutError
        assert (await client.info()).engine == "echo"


async def test_a_shard_on_a_socket_reports_its_health_and_has_no_reflection(tmp_path: Path) -> None:
    """The socket is accessible to its owner only, and gone afterwards."""
    path = tmp_path / "s"
    async with shard(f"unix://{path}") as (client, _), grpc.aio.insecure_channel(f"unix://{path}") as channel:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        info = await client.info()
        assert (info.engine, info.scheduling, info.block_size) == ("echo", pb.SCHEDULING_STEP, 16)
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        # No request is written: the refusal may come first, and would fail the write instead.
        refused = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        assert await refused.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not path.exists()


async def test_a_shard_listens_on_tcp_and_serves_reflection_if_so_configured() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with shard(address, "--reflection") as (client, _), grpc.aio.insecure_channel(address) as channel:
        assert (await client.info()).engine == "echo"
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        listed = (await answers.read()).list_services_response.service
        assert "text_generation.v1.Shard" in [service.name for service in listed]


async def test_a_session_whose_client_is_gone_is_waited_for(tmp_path: Path) -> None:
    async with shard(f"unix://{tmp_path}/s", "--echo-step-ms=300") as (client, _):
        await client.warm_up()
        async with running(client) as call:
            await call.write(start(1, slot=0, prompt=[1], new=100, blocks=list(range(10))))
            for number in range(2, 100):  # orders left behind must not keep the shard busy
                await call.write(pb.Orders(number=number, release=[number]))
            await report(call)
        async with asyncio.timeout(5):
            while True:
                try:
                    await client.warm_up()
                except grpc.aio.AioRpcError as error:  # the shard has not noticed yet
                    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
                else:
                    return
