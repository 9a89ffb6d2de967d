"""In float32 the tokens of a request do not depend on its scheduling: alone, from the prefix cache, in chunks, after a
preemption, or moved to another replica. Greedy and seeded, through the scheduler and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from full_grid import full
from shard_server import running, serve_engine

from text_generation_proto.values import FinishReason, Sampling, WarmUpLimits
from text_generation_router.discovery.source import StaticSource
from text_generation_router.errors import ServingError
from text_generation_router.metrics.instruments import Registry
from text_generation_router.metrics.steps import StepMetrics
from text_generation_router.request import LogprobJson, Request, RequestId, TopToken
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.join import join
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine

pytestmark = pytest.mark.model

NEW_TOKENS = 12
SHARED = 15
"""Index of the test prompt that all requests begin with: 65 tokens, four blocks and one token."""


class Collector:
    """A listener that collects tokens and signals when half of them have arrived."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cached_tokens = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.half = asyncio.Event()

    def on_token(
        self, token_id: int, logprob: LogprobJson, top: Sequence[TopToken], reason: FinishReason | None
    ) -> bool:
        self.tokens.append(token_id)
        if len(self.tokens) == NEW_TOKENS // 2:
            self.half.set()
        if reason is not None:
            self.over.set_result(None)
        return True

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Iterable[Sequence[TopToken]]) -> None: ...

    def on_scheduled(self, cached_tokens: int, replica: int) -> None:
        self.cached_tokens = cached_tokens

    def on_lost(self) -> None: ...

    def on_cached_tokens(self, cached_tokens: int) -> None:
        raise AssertionError("this engine has no prefix cache of its own")

    def on_failure(self, error: ServingError) -> None:
        self.over.set_exception(error)


def build(folder: Path) -> TorchEngine:
    config = ShardConfig(model_path=str(folder), dtype="float32", device="cpu", max_batch_size=16, speculate="0")
    return build_engine(config)


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> TorchEngine:
    return build(demo_model)


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    """Four requests with a common prefix, every other one sampled."""
    shared = prompts[SHARED]
    return [
        Request(
            RequestId(number),
            (*shared, *prompts[number + 3]),
            NEW_TOKENS,
            sampling=Sampling() if number % 2 else Sampling(greedy=False, temperature=0.9, top_p=0.95, seed=number),
            ignore_eos=True,
        )
        for number in range(4)
    ]


async def tokens_of(
    requests: Sequence[Request],
    engines: Sequence[TorchEngine],
    folder: Path,
    *,
    one_by_one: bool = False,
    lose: bool = False,
    pool_tokens: int = 8192,
    policy: dict[str, Any] | None = None,
) -> tuple[list[list[int]], Scheduler]:
    """Run the requests; with `lose`, the first replica is lost when the first request has half its tokens."""
    scheduler = Scheduler(
        Policy(**{"max_batch_prefill_tokens": 160, "max_batch_size": 16, **(policy or {})}), replicas=0
    )
    cluster = Cluster(scheduler, StepMetrics(Registry()))
    limits = WarmUpLimits(max_batch_total_tokens=pool_tokens, max_batch_prefill_tokens=160, max_batch_size=16)
    addresses = [f"unix://{folder}/shard-{number}" for number in range(len(engines))]
    stops: list[Callable[[], None]] = []
    async with AsyncExitStack() as stack:
        joined = {}
        for engine, address in zip(engines, addresses, strict=True):
            shard = await stack.enter_async_context(serve_engine(engine, address))
            joined[address] = await join(shard.client, limits, address, timeout=60)
            stops.append(shard.end_session)
        await stack.enter_async_context(
            running(cluster, partial(cluster.run, StaticSource(addresses).members(), joined, limits))
        )
        async with asyncio.timeout(60):
            while cluster.scheduler.stats().serving_replicas < len(engines):  # noqa: ASYNC110 - there is no event for this
                await asyncio.sleep(0)
        collectors = [Collector() for _ in requests]
        for request, collector in zip(requests, collectors, strict=True):
            cluster.submit(request, collector)
            if one_by_one:
                await collector.over
        async with asyncio.timeout(120):
            if lose:
                await collectors[0].half.wait()
                stops[0]()
            for collector in collectors:
                await collector.over
    return [collector.tokens for collector in collectors], scheduler


@pytest.fixture(scope="module")
def alone(requests: list[Request], engine: TorchEngine, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of each request when it runs alone, without the prefix cache."""
    folder = tmp_path_factory.mktemp("alone")
    tokens, scheduler = asyncio.run(
        tokens_of(requests, [engine], folder, one_by_one=True, policy={"prefix_caching": False})
    )
    assert scheduler.stats().hit_tokens == 0
    return tokens


async def test_together_from_the_prefix_cache(
    requests: list[Request], engine: TorchEngine, alone: list[list[int]], tmp_path: Path
) -> None:
    tokens, scheduler = await tokens_of(requests, [engine], tmp_path)
    assert tokens == alone
    assert scheduler.stats().hit_tokens == 3 * 64  # the first request computed the common prefix


@pytest.mark.parametrize(
    ("pool_tokens", "policy"),
    [
        pytest.param(112, {"growth_tokens": 1}, id="after preemptions"),
        pytest.param(8192, {"max_batch_prefill_tokens": 17}, id="in chunks", marks=pytest.mark.full),
    ],
)
async def test_with_less_memory(
    requests: list[Request],
    engine: TorchEngine,
    alone: list[list[int]],
    tmp_path: Path,
    pool_tokens: int,
    policy: dict[str, Any],
) -> None:
    tokens, scheduler = await tokens_of(requests, [engine], tmp_path, pool_tokens=pool_tokens, policy=policy)
    assert tokens == alone
    assert (scheduler.stats().preemptions > 0) == (pool_tokens < 8192)


@pytest.mark.parametrize("replicas", [2, full(1)], ids=["moved to another replica", "after a restart of its replica"])
async def test_after_a_lost_replica(
    demo_model: Path,
    requests: list[Request],
    engine: TorchEngine,
    alone: list[list[int]],
    tmp_path: Path,
    replicas: int,
) -> None:
    engines = [engine, *(build(demo_model) for _ in range(replicas - 1))]
    tokens, scheduler = await tokens_of(requests, engines, tmp_path, lose=True)
    assert scheduler.stats().moves > 0
    assert tokens == alone
