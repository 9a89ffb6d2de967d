"""Many calls on one session: slots, queue, cancellation, abort, and a router on the same shard."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import grpc
import pytest
from gateway_server import Answer, Gateway, GenerateCall, RecordingEcho, ask, echo, rest, serve_gateway, slow_echo

from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Failure, Orders, StepResult
from text_generation_shard.engines.echo import EchoEngine

ENDLESS = 30_000


async def begun(gateway: Gateway, prompt: list[int], **fields: object) -> GenerateCall:
    """Start a long call and read its first tokens."""
    call: GenerateCall = gateway.stub.Generate(ask(prompt, ENDLESS, **fields))
    await first_tokens(call)
    return call


async def first_tokens(call: GenerateCall) -> list[int]:
    message = await call.read()
    assert isinstance(message, pb.GenerateResponse)
    assert message.chunk.token_ids
    return list(message.chunk.token_ids)


async def test_a_client_that_leaves_frees_its_slot(tmp_path: Path) -> None:
    engine = slow_echo(max_batch_size=2)
    async with serve_gateway(engine, tmp_path) as gateway:
        stays = await begun(gateway, [1])
        leaves = await begun(gateway, [2])
        leaves.cancel()
        # The other slot stays taken.
        assert (await gateway.stream(ask([3], 2))).streamed() == [3, 3]
        assert isinstance(await stays.read(), pb.GenerateResponse)
        stays.cancel()
    assert [admission.slot for admission in engine.admissions] == [0, 1, 1]


async def test_a_client_that_leaves_while_queued_is_dropped(tmp_path: Path) -> None:
    engine = slow_echo(max_batch_size=1)
    async with serve_gateway(engine, tmp_path) as gateway:
        runs = await begun(gateway, [1])
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.stub.Generate(ask([2], 2), timeout=0.05).read()
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        runs.cancel()
        assert (await gateway.stream(ask([3], 2))).streamed() == [3, 3]
    assert [admission.prompt for admission in engine.admissions] == [(1,), (3,)]


async def test_abort_ends_a_queued_call_and_all_sequences_of_a_call(tmp_path: Path) -> None:
    engine = slow_echo(max_batch_size=2)
    async with serve_gateway(engine, tmp_path) as gateway:
        config = pb.SamplingConfig(num_return_sequences=2)
        runs = await begun(gateway, [1], request_id="runs", sampling_config=config)
        waits = gateway.stub.Generate(ask([2], 5, request_id="waits"))
        async with asyncio.timeout(30):
            # The first abort may arrive before the call.
            while not (await gateway.stub.Abort(pb.AbortRequest(request_id="waits"))).success:
                pass
        answer = await rest(waits)
        assert (list(answer.only.output_token_ids), answer.only.finish_reason) == ([], "cancelled")
        assert (await gateway.stub.Abort(pb.AbortRequest(request_id="runs"))).success
        assert [complete.finish_reason for complete in (await rest(runs)).completes] == ["cancelled"] * 2
        # Gateways send an abort for every stream they drop, finished or not.
        for request_id in ("runs", "never seen", ""):
            reply = await gateway.stub.Abort(pb.AbortRequest(request_id=request_id))
            assert (reply.success, reply.message) == (False, "no request of this id is running")
    assert {admission.prompt for admission in engine.admissions} == {(1,)}


class Gated(RecordingEcho):
    """An engine whose steps wait for a permit each."""

    def __init__(self, engine: EchoEngine, tokens_per_report: int) -> None:
        super().__init__(engine, tokens_per_report)
        self.permits = threading.Semaphore(0)
        self.steps = 0
        """Number of steps begun."""
        self.released_after: list[int] = []
        """Number of steps begun before each release."""

    def step(self) -> StepResult | None:
        self.steps += 1
        self.permits.acquire(timeout=60)
        return super().step()

    def apply(self, orders: Orders) -> list[Failure]:
        self.released_after += [self.steps] * len(orders.release)
        return super().apply(orders)


async def test_abort_takes_effect_with_the_step_in_progress(tmp_path: Path) -> None:
    engine = Gated(EchoEngine.build(ShardConfig()), 1)
    async with serve_gateway(engine, tmp_path) as gateway:
        call = gateway.stub.Generate(ask([1], ENDLESS, request_id="long"))
        engine.permits.release()
        assert await first_tokens(call) == [1]
        # The second step has begun, or begins before the engine applies orders again.
        assert (await gateway.stub.Abort(pb.AbortRequest(request_id="long"))).success
        assert list((await rest(call)).only.output_token_ids) == [1]
        engine.permits.release(100)
        assert (await gateway.stream(ask([3], 2))).streamed() == [3, 3]
    assert engine.released_after == [2]


async def test_no_slot_is_lost_over_random_endings(tmp_path: Path) -> None:
    engine = slow_echo(max_batch_size=8)
    chance = random.Random(7)
    plans = [(number, chance.randrange(1, 60), chance.choice(["read", "leave", "abort"])) for number in range(600)]
    async with serve_gateway(engine, tmp_path) as gateway:

        async def run(number: int, new: int, ending: str) -> None:
            request_id, prompt = str(number), [number, 7]
            if ending == "read":
                answer = await gateway.stream(ask(prompt, new, request_id=request_id))
                assert answer.streamed() == list(answer.only.output_token_ids) == (prompt * new)[:new]
                assert answer.request_ids == {request_id}
                return
            call = gateway.stub.Generate(ask(prompt, ENDLESS, request_id=request_id))
            tokens = await first_tokens(call)
            assert tokens == (prompt * len(tokens))[: len(tokens)]
            if ending == "leave":
                call.cancel()
            else:
                assert (await gateway.stub.Abort(pb.AbortRequest(request_id=request_id))).success
                answer = await rest(call)
                assert answer.only.finish_reason == "cancelled"
                assert tokens + answer.streamed() == list(answer.only.output_token_ids)

        async with asyncio.TaskGroup() as tasks:
            for plan in plans:
                tasks.create_task(run(*plan))
        config = pb.SamplingConfig(num_return_sequences=8)
        answer = await gateway.stream(ask([1, 2], 6, sampling_config=config))
        assert [list(complete.output_token_ids) for complete in answer.completes] == [[1, 2] * 3] * 8
        assert engine.running == 0


async def test_a_queue_that_is_full_refuses_at_once(tmp_path: Path) -> None:
    waiting = 20  # calls of one connection
    async with serve_gateway(slow_echo(max_batch_size=1), tmp_path, max_waiting=waiting) as gateway:
        runs = await begun(gateway, [1])
        calls = [gateway.stub.Generate(ask([number], 2)) for number in range(waiting + 1)]
        outcomes: asyncio.Queue[Answer | grpc.aio.AioRpcError] = asyncio.Queue()

        async def wait(call: GenerateCall) -> None:
            try:
                outcomes.put_nowait(await rest(call))
            except grpc.aio.AioRpcError as error:
                outcomes.put_nowait(error)

        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(wait(call))
            refused = await outcomes.get()
            assert isinstance(refused, grpc.aio.AioRpcError)
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refused.details() == f"1 sequences run and {waiting} wait: the shard takes no more"
            runs.cancel()
            for _ in range(waiting):
                served = await outcomes.get()
                assert isinstance(served, Answer)
                assert len(served.streamed()) == 2


async def test_a_slow_reader_gets_larger_chunks_and_holds_no_slot(tmp_path: Path) -> None:
    new = 8_000
    async with serve_gateway(echo(max_batch_size=1), tmp_path) as gateway:
        # Large messages fill the connection's buffers soon.
        slow = gateway.stub.Generate(ask([1, 2], new, output_config=pb.OutputConfig(logprobs=20)))
        first = await first_tokens(slow)
        # The only slot is free once the unread call is computed.
        assert (await gateway.stream(ask([3], 2))).streamed() == [3, 3]
        answer = await rest(slow)
    assert len(answer.chunks) < new / 2
    assert list(answer.only.output_token_ids) == [1, 2] * (new // 2)
    assert first + answer.streamed() == list(answer.only.output_token_ids)


async def test_abort_frees_the_slot_of_a_client_that_does_not_read(tmp_path: Path) -> None:
    engine = slow_echo(max_batch_size=2)
    async with serve_gateway(engine, tmp_path) as gateway:
        slow = gateway.stub.Generate(
            ask([1, 2], ENDLESS, request_id="slow", output_config=pb.OutputConfig(logprobs=20))
        )
        await first_tokens(slow)
        await gateway.stream(ask([3], 1000))  # meanwhile the connection's buffers fill
        assert (await gateway.stub.Abort(pb.AbortRequest(request_id="slow"))).success
        config = pb.SamplingConfig(num_return_sequences=2)
        both = await gateway.stream(ask([4], 2, sampling_config=config))
        assert [list(complete.output_token_ids) for complete in both.completes] == [[4, 4]] * 2
        assert engine.releases == [(0, 2)]
        slow.cancel()


async def test_unread_answers_count_against_the_limit(tmp_path: Path) -> None:
    scored = pb.OutputConfig(logprobs=20)
    async with serve_gateway(echo(max_batch_size=1), tmp_path, max_waiting=1) as gateway:
        slow = gateway.stub.Generate(ask([1, 2], 8_000, output_config=scored))
        await slow.read()
        assert (await gateway.stream(ask([3], 2))).streamed() == [3, 3]
        slower = gateway.stub.Generate(ask([1, 2], 8_000, output_config=scored))
        await slower.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.stream(ask([3], 2))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len((await rest(slow)).only.output_token_ids) == 8_000
        assert (await gateway.stream(ask([3], 2))).streamed() == [3, 3]
        slower.cancel()


async def test_while_a_router_drives_the_shard_a_gateway_cannot(tmp_path: Path) -> None:
    async with serve_gateway(echo(), tmp_path) as gateway:
        await gateway.shard.warm_up()
        run = gateway.shard.run()
        await run.initial_metadata()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.stream(ask([1], 2))
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error.value.details() == "a router drives this shard: its Run session is open"
        health = await gateway.stub.HealthCheck(pb.HealthCheckRequest())
        assert health.status == error.value.details()
        await run.done_writing()
        assert await run.read() is grpc.aio.EOF
        assert (await gateway.stream(ask([1], 2))).streamed() == [1, 1]


async def test_while_a_gateway_drives_the_shard_a_router_cannot(tmp_path: Path) -> None:
    async with serve_gateway(slow_echo(), tmp_path) as gateway:
        call = await begun(gateway, [1], request_id="long")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.shard.run().read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.shard.warm_up(max_batch_total_tokens=64)
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await gateway.stub.Abort(pb.AbortRequest(request_id="long"))
        await rest(call)
        # An idle gateway gives the engine up, and gets it back when the router is gone.
        await gateway.shard.warm_up()
        run = gateway.shard.run()
        await run.initial_metadata()
        await run.done_writing()
        assert await run.read() is grpc.aio.EOF
        assert (await gateway.stream(ask([1], 2))).streamed() == [1, 1]
