"""A router that finds its shards by Kubernetes, through every fault of the API server, while it serves.

Prints the seconds until the router has followed each change. Bars: 2 s, a watch that went silent 90 s; no stream fails. The
shards, the cluster of the router and the API server run in this process, over real gRPC and HTTP; times are the product's.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from cluster_listener import Listener
from kubernetes_api import fake_kubernetes
from servers import free_port
from shard_server import running, serve_engine

from text_generation_common.shard_access import ShardAccess
from text_generation_proto.values import WarmUpLimits
from text_generation_router.discovery.kubernetes import KubernetesSource
from text_generation_router.discovery.source import known
from text_generation_router.metrics.instruments import Registry
from text_generation_router.metrics.steps import StepMetrics
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.first_join import join_first
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.echo import EchoEngine

SHARDS, STREAMS, TOKENS = 32, 8, 300
BAR_S, SILENT_BAR_S = 2.0, 90.0


class Streams:
    """Requests that run one after the other, so many at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._number = 0
        self.ended = self.failed = 0

    async def run(self) -> None:
        while True:
            self._number += 1
            listener = Listener()
            self._cluster.submit(Request(RequestId(self._number), (1, 2, 3), TOKENS), listener)
            await listener.over.wait()
            self.ended += 1
            self.failed += listener.error is not None or listener.tokens != [1, 2, 3] * (TOKENS // 3)


async def until(holds: Callable[[], bool], seconds: float) -> float:
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds:
            return float("inf")
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def main() -> int:
    """Run the changes; return the exit code."""
    late = 0
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(SHARDS)]
        for address in addresses:
            engine = EchoEngine.build(ShardConfig(engine="echo", echo_step_ms=10, echo_blocks=512))
            await stack.enter_async_context(serve_engine(engine, address))
        fake = await stack.enter_async_context(fake_kubernetes(folder))
        cluster = Cluster(Scheduler(Policy(4096, 64), replicas=0), StepMetrics(Registry()))
        limits, access = WarmUpLimits(), ShardAccess.of()
        source = KubernetesSource("default", "shards", "grpc", fake.api)
        began = time.monotonic()
        joining = join_first(source.members(), limits, access, lambda: None)

        def serving(count: int) -> Callable[[], bool]:
            return lambda: [member.state.value for member in cluster.members] == ["serving"] * count

        async def change(
            name: str, act: Callable[[], Awaitable[None] | None], count: int, bar_s: float = BAR_S
        ) -> None:
            nonlocal late
            if (waiting := act()) is not None:
                await waiting
            seconds = await until(serving(count), bar_s + 10)
            late += seconds > bar_s
            print(f"{name:44} {seconds:6.2f} s   bar {bar_s:g} s", flush=True)

        fake.serve(addresses[:1])
        joined = await joining
        print(f"{'first shard':44} {time.monotonic() - began:6.2f} s")
        await stack.enter_async_context(running(cluster, lambda: cluster.run(known(source), joined, limits, access)))
        streams = Streams(cluster)
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(streams.run()) for _ in range(STREAMS)]

            async def lost_delete() -> None:
                fake.down = True
                fake.drop_watches()
                await asyncio.sleep(1.5)
                fake.serve(addresses[:4])
                fake.down = False

            async def gone() -> None:
                fake.serve(addresses[:6])
                fake.compact()
                fake.drop_watches()

            async def rotation() -> None:
                fake.token = "second"
                fake.drop_watches()
                await asyncio.sleep(1.5)
                fake.serve(addresses[:3])
                fake.api.token_file.write_text("second")

            async def empty() -> None:
                fake.serve([])
                await asyncio.sleep(2)

            async def silent() -> None:
                fake.silent = True
                fake.serve(addresses[:2])

            await change("burst to 32", lambda: fake.serve(addresses), SHARDS)
            await asyncio.sleep(TOKENS * 0.02)  # the streams spread
            await change("down to 1", lambda: fake.serve(addresses[:1]), 1, bar_s=BAR_S + TOKENS * 0.01 + 1)
            await change("up to 8", lambda: fake.serve(addresses[:8]), 8)
            await change("deleted while the watch was down", lost_delete, 4, bar_s=BAR_S + TOKENS * 0.01 + 1)
            await change("410 Gone", gone, 6)
            await change("token replaced", rotation, 3, bar_s=BAR_S + TOKENS * 0.01 + 1)
            await change("empty list: all stay", empty, 3)
            await change("a silent watch", silent, 2, bar_s=SILENT_BAR_S)
            for task in clients:
                task.cancel()
        print(f"{streams.ended} streams ended, {streams.failed} of them wrong")
        return 1 if late or streams.failed or not streams.ended else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
