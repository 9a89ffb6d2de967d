"""A shard with the gateway protocol in the test's process, over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from text_generation_proto.client import ShardClient
from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_proto.gateway import trtllm_service_pb2_grpc
from text_generation_proto.v1 import shard_pb2_grpc
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Failure, NewSequence, Orders
from text_generation_shard.engines.echo import EchoEngine
from text_generation_shard.engines.echo_self import SelfSchedulingEcho
from text_generation_shard.gateway.servicer import GatewayServicer
from text_generation_shard.guard import MAX_GATEWAY_STREAMS, create_server
from text_generation_shard.health import ShardHealth
from text_generation_shard.servicer import ShardServicer
from text_generation_shard.session import EngineThread, SessionOwner

GenerateCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class RecordingEcho(SelfSchedulingEcho):
    """The self-scheduling echo engine with a record of its orders."""

    def __init__(self, engine: EchoEngine, tokens_per_report: int) -> None:
        super().__init__(engine, tokens_per_report)
        self.admissions: list[NewSequence] = []
        self.releases: list[tuple[int, int]] = []
        """(slot, admissions before it)."""

    def apply(self, orders: Orders) -> list[Failure]:
        self.releases += ((slot, len(self.admissions)) for slot in orders.release)
        self.admissions += orders.admit
        return super().apply(orders)


def echo(tokens_per_report: int = 1, info: dict[str, object] | None = None, **flags: object) -> RecordingEcho:
    """Build an echo engine with a shard's `flags`; `info` overrides fields of its EngineInfo."""
    engine = EchoEngine.build(ShardConfig(**flags))  # type: ignore[arg-type]
    if info:
        engine = replace(engine, info=replace(engine.info, **info))  # type: ignore[arg-type]
    return RecordingEcho(engine, tokens_per_report)


def slow_echo(**flags: object) -> RecordingEcho:
    """Build an engine with 1 ms per step: long calls stay long even on a machine that stalls."""
    return echo(echo_step_ms=1.0, **flags)


@dataclass(frozen=True, slots=True)
class Gateway:
    """Connections to a shard in this process."""

    channel: grpc.aio.Channel
    stub: trtllm_service_pb2_grpc.TrtllmServiceAsyncStub
    owner: SessionOwner
    shard: ShardClient
    """A router's client of the same shard."""

    async def stream(self, request: pb.GenerateRequest) -> Answer:
        """Return the whole answer of a call."""
        return await rest(self.stub.Generate(request))


@dataclass(slots=True)
class Answer:
    """Messages of a Generate call."""

    chunks: list[pb.GenerateStreamChunk] = field(default_factory=list)
    completes: list[pb.GenerateComplete] = field(default_factory=list)
    request_ids: set[str] = field(default_factory=set)

    def take(self, message: pb.GenerateResponse) -> None:
        self.request_ids.add(message.request_id)
        if message.HasField("chunk"):
            assert not self.completes, "a chunk after a complete"
            assert message.chunk.token_ids, "an empty chunk"
            self.chunks.append(message.chunk)
        else:
            self.completes.append(message.complete)

    @property
    def only(self) -> pb.GenerateComplete:
        [complete] = self.completes
        return complete

    def streamed(self, index: int = 0) -> list[int]:
        """Return the tokens of one sequence's chunks."""
        return [token for chunk in self.chunks if chunk.sequence_index == index for token in chunk.token_ids]


async def rest(call: GenerateCall) -> Answer:
    """Read the rest of a call."""
    answer = Answer()
    while isinstance(message := await call.read(), pb.GenerateResponse):
        answer.take(message)
    return answer


def ask(prompt: list[int], new: int, **fields: object) -> pb.GenerateRequest:
    """Return a streaming request."""
    request = {"request_id": "r", "streaming": True, "max_tokens": new, **fields}
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_token_ids=prompt), **request)  # type: ignore[arg-type]


@asynccontextmanager
async def serve_gateway(
    engine: Engine | None, folder: Path, *, model: Path | None = None, max_waiting: int = 1024
) -> AsyncIterator[Gateway]:
    """Serve `engine` on a socket in `folder`; None: the model is loading. `model` is the folder of the tokenizer."""
    thread = EngineThread()
    owner = SessionOwner(thread)
    if engine is not None:
        owner.serve(engine)
    server = create_server(max_streams=MAX_GATEWAY_STREAMS)
    shard_pb2_grpc.add_ShardServicer_to_server(ShardServicer(owner, ShardHealth()), server)
    trtllm_service_pb2_grpc.add_TrtllmServiceServicer_to_server(
        GatewayServicer(owner, model, tensor_parallel=2, max_waiting=max_waiting), server
    )
    address = f"unix://{folder}/gateway"
    server.add_insecure_port(address)
    await server.start()
    try:
        # Small flow-control windows: a client that does not read is noticed.
        options = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(address, options) as channel, ShardClient.connect(address) as shard:
            yield Gateway(channel, trtllm_service_pb2_grpc.TrtllmServiceStub(channel), owner, shard)
    finally:
        owner.stop()
        await server.stop(grace=1)
        thread.close()
