"""A shard that serves the gateway protocol beside its own, in the test's own process, over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from text_generation_proto.channel import SERVER_OPTIONS
from text_generation_proto.client import ShardClient
from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_proto.gateway import trtllm_service_pb2_grpc
from text_generation_proto.v1 import shard_pb2_grpc
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Failure, NewSequence, Orders
from text_generation_shard.engines.echo import EchoEngine
from text_generation_shard.engines.echo_self import SelfSchedulingEcho
from text_generation_shard.gateway.servicer import GatewayServicer
from text_generation_shard.servicer import ShardServicer
from text_generation_shard.session import EngineThread, SessionOwner

GenerateCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class RecordingEcho(SelfSchedulingEcho):
    """The echo engine that schedules for itself, and remembers what it was asked."""

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
    """An echo engine made with a shard's `flags`; `info` replaces what it says of itself."""
    engine = EchoEngine.build(ShardConfig(**flags))  # type: ignore[arg-type]
    if info:
        engine = replace(engine, info=replace(engine.info, **info))  # type: ignore[arg-type]
    return RecordingEcho(engine, tokens_per_report)


def slow_echo(**flags: object) -> RecordingEcho:
    """One that takes its time: what is to go on for long does so on a machine that stalls as well."""
    return echo(echo_step_ms=1.0, **flags)


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway's view of a shard in this process."""

    address: str
    channel: grpc.aio.Channel
    stub: trtllm_service_pb2_grpc.TrtllmServiceAsyncStub
    owner: SessionOwner
    shard: ShardClient
    """The same shard, as a router sees it."""

    async def stream(self, request: pb.GenerateRequest) -> Answer:
        """Everything one call answers."""
        return await rest(self.stub.Generate(request))


@dataclass(slots=True)
class Answer:
    """What a Generate call has brought."""

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
        """The tokens of one sequence's chunks, joined."""
        return [token for chunk in self.chunks if chunk.sequence_index == index for token in chunk.token_ids]


async def rest(call: GenerateCall) -> Answer:
    """What a call still has to answer."""
    answer = Answer()
    while isinstance(message := await call.read(), pb.GenerateResponse):
        answer.take(message)
    return answer


def ask(prompt: list[int], new: int, **fields: object) -> pb.GenerateRequest:
    """A request that streams."""
    request = {"request_id": "r", "streaming": True, "max_tokens": new, **fields}
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_token_ids=prompt), **request)  # type: ignore[arg-type]


@asynccontextmanager
async def serve_gateway(
    engine: Engine | None, folder: Path, *, model: Path | None = None, max_waiting: int = 1024
) -> AsyncIterator[Gateway]:
    """Serve `engine` on a socket in `folder`, None: as while it loads. `model` is where the tokenizer is."""
    thread = EngineThread()
    owner = SessionOwner(thread)
    if engine is not None:
        owner.serve(engine)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    shard_pb2_grpc.add_ShardServicer_to_server(ShardServicer(owner, rank=0, world_size=1), server)
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
            yield Gateway(address, channel, trtllm_service_pb2_grpc.TrtllmServiceStub(channel), owner, shard)
    finally:
        owner.stop()
        await server.stop(grace=1)
        thread.close()
