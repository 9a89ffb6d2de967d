"""Several shards behind one scheduler, over real gRPC: who is given what, and who is given nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpc_health.v1 import health_pb2
from shard_server import ServedShard, running, serve_engine

from text_generation_router.errors import ServingError, Unhealthy
from text_generation_router.metrics.steps import StepMetrics
from text_generation_router.request import FinishReason, LogprobJson, Request, RequestId, TopToken
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.join import WarmUpLimits, join
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.echo import EchoEngine

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


class Listener:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: ServingError | None = None
        self.over = asyncio.Event()

    def on_token(
        self, token_id: int, logprob: LogprobJson, top: Sequence[TopToken], reason: FinishReason | None
    ) -> bool:
        self.tokens.append(token_id)
        if reason is not None:
            self.over.set()
        return True

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Sequence[Sequence[TopToken]]) -> None: ...

    def on_scheduled(self, cached_tokens: int) -> None: ...

    def on_failure(self, error: ServingError) -> None:
        self.error = error
        self.over.set()


@dataclass
class Replicas:
    """A cluster, its shards and their engines."""

    cluster: Cluster
    shards: list[ServedShard]
    engines: list[EchoEngine]
    requests: int = 0

    def submit(self, new: int) -> Listener:
        listener = Listener()
        self.requests += 1
        self.cluster.submit(Request(RequestId(self.requests), (1, 2, 3), new), listener)
        return listener

    @property
    def running(self) -> list[int]:
        return [engine.running for engine in self.engines]

    async def until_running(self, *numbers: int) -> None:
        async with asyncio.timeout(20):
            while self.running != list(numbers):  # noqa: ASYNC110 - an engine has no event for it
                await asyncio.sleep(0)


@asynccontextmanager
async def two_replicas(folder: Path) -> AsyncIterator[Replicas]:
    cluster = Cluster(Scheduler(Policy(4096, 64), replicas=2), StepMetrics())
    engines = [EchoEngine.build(ShardConfig(engine="echo", echo_step_ms=2)) for _ in range(2)]
    addresses = [f"unix://{folder}/shard-{number}" for number in range(2)]
    limits = WarmUpLimits()
    async with AsyncExitStack() as stack:
        shards, joined = [], []
        for engine, address in zip(engines, addresses, strict=True):
            shards.append(await stack.enter_async_context(serve_engine(engine, address)))
            joined.append(await join(shards[-1].client, limits, address, timeout=20))
        await stack.enter_async_context(running(cluster, partial(cluster.run, addresses, joined, limits)))
        async with asyncio.timeout(20):
            while cluster.scheduler.open_replicas < 2:  # noqa: ASYNC110 - nobody else waits for the second one
                await asyncio.sleep(0)
        yield Replicas(cluster, shards, engines)


async def test_requests_are_spread_by_load(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as replicas:
        listeners = [replicas.submit(200) for _ in range(6)]
        await replicas.until_running(3, 3)
        for listener in listeners:
            await listener.over.wait()
        assert [listener.tokens for listener in listeners] == [[1, 2, 3] * 66 + [1, 2]] * 6


async def test_a_shard_that_says_it_does_not_serve_gets_nothing_new_and_ends_what_it_has(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as replicas:
        first = [replicas.submit(400) for _ in range(2)]
        await replicas.until_running(1, 1)
        await replicas.shards[0].health.set("", NOT_SERVING)
        async with asyncio.timeout(20):
            while 0 not in replicas.cluster.scheduler._replicas.draining:  # noqa: ASYNC110 - it has to cross the wire
                await asyncio.sleep(0)
        more = [replicas.submit(50) for _ in range(3)]
        await replicas.until_running(1, 4)
        for listener in (*first, *more):
            await listener.over.wait()
        assert [len(listener.tokens) for listener in (*first, *more)] == [400, 400, 50, 50, 50]
        await replicas.shards[0].health.set("", SERVING)
        async with asyncio.timeout(20):
            while replicas.cluster.scheduler._replicas.draining:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
        replicas.submit(400)
        replicas.submit(400)
        await replicas.until_running(1, 1)


async def test_what_ran_on_a_lost_shard_goes_on_where_it_was(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as replicas:
        listeners = [replicas.submit(300) for _ in range(8)]
        await replicas.until_running(4, 4)
        replicas.shards[1].end_session()
        for listener in listeners:
            await listener.over.wait()
        assert [listener.tokens for listener in listeners] == [[1, 2, 3] * 100] * 8
        assert replicas.cluster.scheduler.moves == 4


async def test_after_the_end_requests_are_refused_at_once(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as replicas:
        running_one = replicas.submit(10_000)
        replicas.cluster.give_up("the server was stopped")
        await running_one.over.wait()
        assert "the server was stopped" in str(running_one.error)
        assert isinstance(replicas.submit(1).error, Unhealthy)
