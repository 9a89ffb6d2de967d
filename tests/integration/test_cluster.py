"""Several shards behind one scheduler, over real gRPC: spread of load, draining, lost and silent shards."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from bisect import bisect_left
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import shard_server
from checked_echo import CheckedEcho
from cluster_listener import Listener
from grpc_health.v1 import health_pb2
from http_stack import until
from served_cluster import Members, world
from shard_server import ServedShard, serve_engine
from structlog.testing import capture_logs

from text_generation_common.heartbeat import HANG_TIMEOUT_S
from text_generation_common.shard_access import ShardAccess
from text_generation_common.sockets import remove_socket
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import WarmUpLimits
from text_generation_router.dashboard.events import EventLog
from text_generation_router.discovery.source import StaticSource
from text_generation_router.errors import DeadlineExceeded, Unhealthy
from text_generation_router.metrics.instruments import Registry
from text_generation_router.metrics.steps import StepMetrics
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards import replica
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.first_join import join_all
from text_generation_router.shards.join import join
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import StepResult
from text_generation_shard.engines.echo import MAX_SLOTS, EchoEngine

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class Replicas:
    """A cluster of two replicas."""

    router: Members
    shards: list[ServedShard]
    engines: list[CheckedEcho]

    @property
    def cluster(self) -> Cluster:
        return self.router.cluster

    async def until_running(self, *numbers: int) -> None:
        await until(lambda: [engine.running for engine in self.engines] == list(numbers))

    async def until_draining(self, *numbers: int) -> None:
        await until(lambda: self.cluster.scheduler.draining == set(numbers))


@asynccontextmanager
async def two_replicas(
    folder: Path, max_batch_size: int = 64, hang_timeout_s: float = HANG_TIMEOUT_S
) -> AsyncIterator[Replicas]:
    async with world(folder) as shards:
        a, b = await shards.shard("a"), await shards.shard("b")
        router = await shards.cluster(a, max_batch_size=max_batch_size, hang_timeout_s=hang_timeout_s)
        router.set(a, b)
        await router.until({a: "serving", b: "serving"})
        yield Replicas(router, list(shards.shards.values()), list(shards.engines.values()))


async def test_a_shard_that_does_not_serve_finishes_its_requests_and_gets_no_new_ones(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as replicas:
        first = [replicas.router.submit(400) for _ in range(2)]
        await replicas.until_running(1, 1)
        await replicas.shards[0].health.set("", NOT_SERVING)
        await replicas.until_draining(0)
        more = [replicas.router.submit(50) for _ in range(3)]
        await replicas.until_running(1, 4)
        for listener in (*first, *more):
            await listener.over.wait()
        assert [len(listener.tokens) for listener in (*first, *more)] == [400, 400, 50, 50, 50]
        await replicas.shards[0].health.set("", SERVING)
        await replicas.until_draining()
        replicas.router.submit(400)
        replicas.router.submit(400)
        await replicas.until_running(1, 1)


async def test_requests_of_a_lost_shard_continue_with_their_next_token(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as replicas:
        listeners = [replicas.router.submit(300) for _ in range(8)]
        await replicas.until_running(4, 4)
        replicas.shards[1].end_session()
        for listener in listeners:
            await listener.over.wait()
        assert [listener.tokens for listener in listeners] == [[1, 2, 3] * 100] * 8
        assert replicas.cluster.scheduler.stats().moves == 4
        assert sum(replicas.router.metrics.token_gaps.of().counts) == 8 * 299


async def test_a_shard_that_drains_keeps_its_requests_and_is_left_after_the_last(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as replicas:
        with capture_logs() as records:
            listeners = [replicas.router.submit(100 + 50 * number) for number in range(6)]
            await replicas.until_running(3, 3)
            await replicas.shards[0].drain()
            await replicas.until_draining(0)
            listeners += [replicas.router.submit(50) for _ in range(3)]
            for listener in listeners:
                await listener.over.wait()
            await until(lambda: replicas.cluster.scheduler.stats().serving_replicas == 1)
            assert [len(listener.tokens) for listener in listeners] == [*range(100, 400, 50), 50, 50, 50]
            assert replicas.cluster.scheduler.stats().moves == 0
        ends = [record["log_level"] for record in records if record["event"] in ("shard stopped", "shard lost")]
        assert ends == ["info"], "a planned stop is no error"


async def test_requests_of_a_shard_that_owes_a_report_move_once_it_says_that_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that answers health checks may be computing a long prompt: it gets no new requests, and keeps its requests."""
    monkeypatch.setattr(replica, "HANGS_AFTER_S", 1.0)
    async with two_replicas(tmp_path, hang_timeout_s=2.0) as replicas:
        silent, stats = replicas.engines[0], replicas.cluster.scheduler.stats
        members, events = list(replicas.cluster.members), EventLog()
        events.observe(members, stats())
        first = [replicas.router.submit(300) for _ in range(2)]
        await replicas.until_running(1, 1)
        await until(lambda: bool(first[0].tokens))
        resume = threading.Event()
        step = silent.step
        monkeypatch.setattr(silent, "step", lambda: (resume.wait(), step())[1])
        await replicas.until_draining(0)
        assert stats().serving_replicas == 1
        assert [member.state.value for member in members] == ["hung", "serving"]
        events.observe(members, stats())
        more = [replicas.router.submit(20) for _ in range(3)]
        for listener in (*more, first[1]):
            await listener.over.wait()
        assert not first[0].over.is_set()
        assert stats().moves == 0
        await replicas.shards[0].health.set("", NOT_SERVING)
        await first[0].over.wait()
        assert stats().moves == 1
        resume.set()
        gaps = replicas.router.metrics.token_gaps.of()
        long = sum(gaps.counts[bisect_left(gaps.bounds, replica.HANGS_AFTER_S) :])
        assert (sum(gaps.counts), long) == (2 * 299 + 3 * 19, 1), "the gap of the request that moved"
        events.observe(members, stats())
        shown = [(each["kind"], each["text"], each.get("count")) for each in events.after(0.0, reasons=False)]
        hung, lost, *_, moved = shown
        assert (hung, lost) == (("hung", "Replica 0 hangs", None), ("lost", "Replica 0 lost", None))
        assert moved == ("moved", "Requests moved after a loss", 1)
        assert "it hangs" in next(each["reason"] for each in events.after(0.0, reasons=True) if each["kind"] == "lost")
        assert [listener.tokens for listener in first] == [[1, 2, 3] * 100] * 2


async def test_an_invalid_report_ends_the_session_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_replicas(tmp_path) as replicas:
        listeners = [replicas.router.submit(100) for _ in range(4)]
        await replicas.until_running(2, 2)
        faulty = replicas.engines[0]

        def invalid_report() -> StepResult | None:
            monkeypatch.undo()
            return StepResult(slots=[faulty.info.max_slots], token_ids=[1], logprobs=[0.0])

        monkeypatch.setattr(faulty, "step", invalid_report)
        for listener in listeners:
            await listener.over.wait()
        assert [listener.tokens for listener in listeners] == [[1, 2, 3] * 33 + [1]] * 4
        assert replicas.cluster.scheduler.stats().moves == 2


async def test_a_request_behind_one_cancelled_before_it_was_sent_is_placed(tmp_path: Path) -> None:
    async with two_replicas(tmp_path, max_batch_size=1) as replicas:
        first, second, third = (replicas.router.submit(5) for _ in range(3))
        replicas.cluster.cancel(RequestId(1))
        replicas.cluster.cancel(RequestId(2))
        async with asyncio.timeout(20):
            await third.over.wait()
        assert (first.tokens, second.tokens, len(third.tokens)) == ([], [], 5)


async def test_requests_past_their_deadline_and_those_of_a_stopped_cluster_are_refused(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as replicas:
        for over in ({"end_by": 1.0}, {"queue_by": 1.0}):
            with pytest.raises(DeadlineExceeded):
                replicas.router.submit(10, **over)
        assert not replicas.cluster.scheduler.requests
        running_one = replicas.router.submit(10_000)
        replicas.cluster.give_up("the server was stopped")
        await running_one.over.wait()
        assert "the server was stopped" in str(running_one.error)
        with pytest.raises(Unhealthy):
            replicas.router.submit(1)


@pytest.mark.timeout(60)
async def test_a_stop_at_the_moment_of_a_loss_ends_the_cluster(tmp_path: Path) -> None:
    class LostWhileStopping(StepMetrics):
        def on_report(self, record: object) -> None:
            if not serving.cancelling():
                serving.cancel()
                raise replica.ShardLost("lost while stopping")

    cluster = Cluster(Scheduler(Policy(4096, 64), replicas=0), LostWhileStopping(Registry()))
    address, limits = f"unix://{tmp_path}/shard", WarmUpLimits()
    async with serve_engine(CheckedEcho.build(ShardConfig(engine="echo")), address) as shard:
        joined = await join(shard.client, limits, address, timeout=20)
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(cluster.run(StaticSource([address]).members(), {address: joined}, limits))
            await cluster.opened()
            cluster.submit(Request(RequestId(1), (1, 2, 3), 5), Listener())
    assert serving.cancelled()


@pytest.mark.parametrize(("asked", "told"), [(0, 0), (64, 64), (MAX_SLOTS + 1, MAX_SLOTS)])
async def test_a_shard_is_told_a_limit_of_sequences_only_if_there_is_one(tmp_path: Path, asked: int, told: int) -> None:
    """Without one it divides its memory for long sequences."""
    seen: list[WarmUpLimits] = []

    class Recording(EchoEngine):
        def warm_up(self, limits: WarmUpLimits) -> tuple[CacheGroup, ...]:
            seen.append(limits)
            return super().warm_up(limits)

    address = f"unix://{tmp_path}/shard"
    async with serve_engine(Recording.build(ShardConfig(engine="echo")), address) as shard:
        await join(shard.client, WarmUpLimits(max_batch_size=asked), address, timeout=20)
    assert [each.max_batch_size for each in seen] == [told]


DYING = """
import asyncio, os, signal, sys
from shard_server import serve_engine
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.echo import EchoEngine
from text_generation_shard.servicer import ShardServicer
class Dying(ShardServicer):
    async def WarmUp(self, request, context):
        os.kill(os.getpid(), signal.SIGKILL)
async def main():
    async with serve_engine(EchoEngine.build(ShardConfig(engine="echo")), sys.argv[1], Dying):
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_router_waits_for_the_restart_of_a_shard_that_dies_in_its_first_warm_up(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/shard"
    environ = os.environ | {"PYTHONPATH": str(Path(shard_server.__file__).parent)}
    dying = await asyncio.create_subprocess_exec(sys.executable, "-c", DYING, address, env=environ)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        joining = tasks.create_task(join_all([address], WarmUpLimits(), ShardAccess.of(), 60))
        assert await dying.wait() == -signal.SIGKILL
        remove_socket(tmp_path / "shard")
        async with serve_engine(CheckedEcho.build(ShardConfig(engine="echo")), address):
            assert (await joining)[address] is not None


async def test_a_router_that_takes_over_serves_without_a_shard_that_is_gone(tmp_path: Path) -> None:
    here, gone = f"unix://{tmp_path}/here", f"unix://{tmp_path}/gone"
    async with serve_engine(CheckedEcho.build(ShardConfig(engine="echo")), here):
        first = await join_all([here], WarmUpLimits(), ShardAccess.of(), 20)
        async with asyncio.timeout(20):
            second = await join_all([here, gone], WarmUpLimits(), ShardAccess.of(), 60)
    assert [first[here] is not None, second[here] is not None, second[gone]] == [True, True, None]
