"""Health, failures and descriptions over the gateway protocol, and services that are not offered."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

import grpc
import pytest
from byte_tokenizer import write_tokenizer
from gateway_server import Gateway, ask, echo, rest, serve_gateway, slow_echo

from text_generation_proto.gateway import common_pb2
from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import InsufficientMemory, StepResult
from text_generation_shard.engines.echo import EchoEngine
from text_generation_shard.engines.echo_self import SelfSchedulingEcho
from text_generation_shard.gateway.describe import archive_chunks, build_archive


async def health(gateway: Gateway) -> str:
    return (await gateway.stub.HealthCheck(pb.HealthCheckRequest())).status


async def failure(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """Return status and message of the error that the call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


async def test_calls_are_unavailable_while_the_model_loads(tmp_path: Path) -> None:
    async with serve_gateway(None, tmp_path) as gateway:
        assert await health(gateway) == "the model is loading"
        loading = (grpc.StatusCode.UNAVAILABLE, "the model is loading")
        assert await failure(gateway.stream(ask([1], 2))) == loading
        assert await failure(gateway.stub.GetModelInfo(pb.GetModelInfoRequest())) == loading
        gateway.owner.serve(echo())
        assert await health(gateway) == "OK"


async def test_a_failed_sequence_fails_only_its_call_and_a_failed_step_the_calls_in_it(tmp_path: Path) -> None:
    async with serve_gateway(slow_echo(echo_fail_token=13, echo_fail_step_token=14), tmp_path) as gateway:
        other = gateway.stub.Generate(ask([1], 30_000))
        await other.read()
        config = pb.SamplingConfig(num_return_sequences=2)
        code, message = await failure(gateway.stream(ask([5, 13], 4, sampling_config=config)))
        assert (code, message) == (grpc.StatusCode.INTERNAL, "this token fails, as the echo engine was told")
        assert isinstance(await other.read(), pb.GenerateResponse)
        assert (await failure(gateway.stream(ask([14], 4))))[0] is grpc.StatusCode.INTERNAL
        assert (await failure(rest(other)))[0] is grpc.StatusCode.INTERNAL
        assert (await gateway.stream(ask([1], 2))).streamed() == [1, 1]
        assert await health(gateway) == "OK"


class Breaking(SelfSchedulingEcho):
    """An engine whose third step raises."""

    steps = 0

    def step(self) -> StepResult | None:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("the device is gone")
        return super().step()


async def test_a_broken_engine_fails_every_call_and_the_health(tmp_path: Path) -> None:
    engine = Breaking(EchoEngine.build(ShardConfig(max_batch_size=1)), 1)
    async with serve_gateway(engine, tmp_path) as gateway:
        runs, waits = (gateway.stub.Generate(ask([1], 20)) for _ in range(2))
        for call in (rest(runs), rest(waits), gateway.stream(ask([1], 2))):
            assert await failure(call) == (grpc.StatusCode.INTERNAL, "the engine failed")
        assert await health(gateway) == "the engine failed"
        assert gateway.owner.crashed.is_set()


async def test_a_stopping_shard_ends_its_calls(tmp_path: Path) -> None:
    async with serve_gateway(slow_echo(), tmp_path) as gateway:
        call = gateway.stub.Generate(ask([1], 30_000))
        await call.read()
        gateway.owner.stop()
        stopping = (grpc.StatusCode.UNAVAILABLE, "the shard is stopping")
        assert await failure(rest(call)) == stopping
        assert await failure(gateway.stream(ask([1], 2))) == stopping
        assert await health(gateway) == stopping[1]


async def test_an_engine_that_breaks_while_idle_fails_the_next_call(tmp_path: Path) -> None:
    async with serve_gateway(echo(), tmp_path) as gateway:
        assert (await gateway.stream(ask([1], 2))).streamed() == [1, 1]
        gateway.owner.crashed.set()
        assert await failure(gateway.stream(ask([1], 2))) == (grpc.StatusCode.INTERNAL, "the engine failed")


class Short(SelfSchedulingEcho):
    """An engine whose first warm-up fails."""

    attempts = 0

    def warm_up(self, limits: WarmUpLimits) -> int:
        self.attempts += 1
        if self.attempts == 1:
            raise InsufficientMemory("8 GB are needed, 4 GB are there")
        return super().warm_up(limits)


async def test_a_failed_warm_up_is_reported_and_tried_again(tmp_path: Path) -> None:
    async with serve_gateway(Short(EchoEngine.build(ShardConfig()), 1), tmp_path) as gateway:
        message = "8 GB are needed, 4 GB are there"
        assert await failure(gateway.stream(ask([1], 2))) == (grpc.StatusCode.INTERNAL, message)
        assert await health(gateway) == message
        assert (await gateway.stream(ask([1], 2))).streamed() == [1, 1]
        assert await health(gateway) == "OK"


async def test_a_warm_engine_is_not_warmed_up_again(tmp_path: Path) -> None:
    engine = Short(EchoEngine.build(ShardConfig()), 1)
    engine.attempts = 1
    async with serve_gateway(engine, tmp_path) as gateway:
        await gateway.shard.warm_up(max_batch_total_tokens=64)
        for _ in range(2):
            assert (await gateway.stream(ask([1], 2))).streamed() == [1, 1]
        _, message = await failure(gateway.stream(ask([1], 65)))
        assert message == "prompt and new tokens exceed the engine's KV pool of 64 tokens"
    assert engine.attempts == 2


async def test_model_server_and_tokenizer_are_described(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    async with serve_gateway(echo(model_path=str(tmp_path)), tmp_path, model=tmp_path) as gateway:
        assert (await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size == 1 << 20
        assert (await gateway.stub.GetServerInfo(pb.GetServerInfoRequest())).world_size == 2
        chunks = [chunk async for chunk in gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert chunks == list(archive_chunks(build_archive(tmp_path)))
    async with serve_gateway(echo(), tmp_path) as gateway:
        method = "/trtllm.TrtllmService/GetTokenizer"
        assert await status(gateway.channel, method, streams=True) is grpc.StatusCode.UNIMPLEMENTED


METHODS = ["HealthCheck", "Abort", "GetModelInfo", "GetServerInfo", "Embed"]
STREAMS = ["Generate", "GetTokenizer", "SubscribeKvEvents"]


async def status(channel: grpc.aio.Channel, method: str, *, streams: bool = False) -> grpc.StatusCode:
    """Return the status of an empty request: an empty message is valid for every method."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        if streams:
            async for _ in channel.unary_stream(method)(b""):
                pass
        else:
            await channel.unary_unary(method)(b"")
    return error.value.code()


async def test_a_step_scheduled_engine_is_unimplemented(tmp_path: Path) -> None:
    async with serve_gateway(EchoEngine.build(ShardConfig()), tmp_path) as gateway:
        for method in METHODS + STREAMS:
            code = await status(gateway.channel, f"/trtllm.TrtllmService/{method}", streams=method in STREAMS)
            assert code is grpc.StatusCode.UNIMPLEMENTED, method
