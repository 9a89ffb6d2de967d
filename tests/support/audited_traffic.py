"""Shards, an auditor of all requests, and mixed traffic of two tenants, in one process over real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cluster_listener import Listener
from scheduler_checks import check_replica
from shard_server import ServedShard, running, serve_engine

from text_generation_proto.values import Grammar, GrammarKind, Sampling, WarmUpLimits
from text_generation_router.audit.auditor import Auditor
from text_generation_router.config import RouterConfig
from text_generation_router.discovery.source import StaticSource
from text_generation_router.errors import GrammarFailed
from text_generation_router.metrics import Metrics
from text_generation_router.request import QualityOfService, Request, TenantId
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.join import join
from text_generation_shard.engine import Engine

ALL = RouterConfig(audit_share=1, audit_busy=1)
LINES = Grammar(GrammarKind.REGEX, r"(item [0-9]{1,3}\n){2,6}end")


@dataclass
class Audited:
    """A cluster whose requests are all audited."""

    cluster: Cluster
    auditor: Auditor
    metrics: Metrics
    shards: Sequence[ServedShard]
    random: random.Random
    grammars: bool
    vocab_size: int
    submitted: list[Listener] = field(default_factory=list)
    events: list[tuple[str, str, str]] = field(default_factory=list)

    def submit(self, request: Request) -> Listener:
        listener = Listener()
        self.cluster.submit(request, listener)
        self.submitted.append(listener)
        return listener

    def request(self, tenant: int, new: int) -> Request:
        """Return a request of one of a few kinds, with the tenant's own beginning of the prompt or one of its own."""
        draw = self.random
        first, vocab = 5 + 50 * tenant, self.vocab_size
        begin = range(first, first + 40) if draw.random() < 0.4 else ()
        prompt = (*begin, *(draw.randrange(vocab // 10, vocab // 2) for _ in range(draw.randrange(20, 50))))
        kinds = (
            Sampling(),
            Sampling(greedy=False, seed=draw.randrange(1 << 30), temperature=0.9),
            Sampling(greedy=False, seed=draw.randrange(1 << 30), top_p=0.9, top_k=50),
            Sampling(repetition_penalty=1.2, output_frequency_penalty=0.3),
        )
        grammar = LINES if self.grammars and draw.random() < 0.3 else None
        qos = QualityOfService(TenantId(f"tenant {tenant}"), salt=f"tenant {tenant}")
        sampling = draw.choice(kinds)
        return Request(next(self.cluster.ids), prompt, new, sampling=sampling, grammar=grammar, qos=qos)

    async def burst(self, size: int, new: int = 24, *, loses: int | None = None) -> None:
        """Serve some requests together, one alone, and two of one token, and wait for their audits.

        Lose the shard `loses` after the first of them has some tokens.
        """
        together = [self.submit(self.request(number % 2, new)) for number in range(size)]
        if loses is not None:
            async with asyncio.timeout(600):
                while len(together[0].tokens) < new // 4:  # noqa: ASYNC110 - a token has no event
                    await asyncio.sleep(0.001)
            self.shards[loses].end_session()
        await _all(together)
        await _all([self.submit(self.request(0, new // 2))])
        await self.idle()
        for _ in range(2):
            await _all([self.submit(self.request(1, 1))])
            await self.idle()

    async def idle(self) -> None:
        """Wait until all audits are done."""
        async with asyncio.timeout(600):
            while self.auditor.waiting:  # noqa: ASYNC110 - they have no event
                await asyncio.sleep(0.001)

    @property
    def suspect(self) -> str:
        """The likely cause that the last finding names."""
        return self.events[-1][1].rpartition(": ")[2]

    @property
    def audited(self) -> int:
        return sum(self.auditor.verdicts.values())


async def _all(listeners: Sequence[Listener]) -> None:
    async with asyncio.timeout(600):
        for listener in listeners:
            await listener.over.wait()
            # A grammar may also notice that its state was lost.
            assert listener.error is None or isinstance(listener.error, GrammarFailed), listener.error


@asynccontextmanager
async def audited(
    engines: Sequence[Engine],
    folder: Path,
    *,
    config: RouterConfig = ALL,
    seed: int = 1,
    limits: WarmUpLimits = WarmUpLimits(),  # noqa: B008 - immutable
    max_batch_size: int = 64,
) -> AsyncIterator[Audited]:
    """Serve `engines`, one replica each."""
    addresses = [f"unix://{folder}/shard-{number}" for number in range(len(engines))]
    async with AsyncExitStack() as stack:
        shards, joined = [], {}
        for engine, address in zip(engines, addresses, strict=True):
            shards.append(await stack.enter_async_context(serve_engine(engine, address)))
            joined[address] = await join(shards[-1].client, limits, address, timeout=60)
        info = joined[addresses[0]].info
        budget = min(256, info.suggested_prefill_tokens)
        scheduler = Scheduler(Policy(budget, max_batch_size), replicas=0)
        metrics = Metrics(max_input_tokens=1024, max_total_tokens=2048, scheduler=scheduler)
        auditor = Auditor(scheduler, metrics.steps, config, info, config.audit_share or 0)
        cluster: Cluster[Any] = Cluster(scheduler, auditor)
        auditor.cluster = cluster
        cluster.on_submit = auditor.on_submit
        metrics.add_audits(auditor)
        grammars = bool(info.grammar_kinds)
        result = Audited(cluster, auditor, metrics, shards, random.Random(seed), grammars, info.vocab_size)
        auditor.on_finding = lambda *event: result.events.append(event)
        source = StaticSource(addresses)
        await stack.enter_async_context(running(cluster, partial(cluster.run, source.members(), joined, limits)))
        async with asyncio.timeout(20):
            while cluster.scheduler.stats().serving_replicas < len(engines):  # noqa: ASYNC110
                await asyncio.sleep(0)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(auditor.run())
            yield result
            task.cancel()
        for replica in scheduler.serving:
            check_replica(replica)
