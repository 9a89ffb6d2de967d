"""The order of starting and stopping, with small processes in the place of shard and router."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import standins

from text_generation_launcher.child import ChildFailed
from text_generation_launcher.plan import ChildSpec, LaunchPlan, ShardSpec
from text_generation_launcher.shard_restarts import RestartPolicy
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_launcher.supervisor import Supervisor

pytestmark = pytest.mark.system


class Stage:
    """Where stand-ins play: a folder, a journal of what happened, a free port."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "s"
        self._journal = standins.Journal(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def shard(self, change: str = "") -> ShardSpec:
        return standins.shard(self._journal, self.socket, change=change)

    def router(self, change: str = "") -> ChildSpec:
        return standins.router(self._journal, self.port, change=change)

    def supervisor(self, shard: ShardSpec, router: ChildSpec) -> Supervisor:
        plan = LaunchPlan((shard,), router, "127.0.0.1", self.port)
        return Supervisor(plan, GracefulShutdown(), RestartPolicy(), json_output=False)

    async def next_word(self) -> str:
        return await self._journal.next()

    def close(self) -> None:
        self._journal.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        stage = Stage(Path(folder))
        yield stage
        stage.close()


async def test_the_router_starts_when_the_shard_serves_and_not_when_it_listens(stage: Stage) -> None:
    loads = """
async def serve(health, stop):
    say("shard-loads")
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    await stop.wait()
"""
    supervisor = stage.supervisor(stage.shard(change=loads), stage.router())
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(supervisor.run())
        words = [await stage.next_word() for _ in range(3)]
        task.cancel()
    assert words == ["shard-listens", "shard-loads", "router-listens"]


async def test_the_router_is_stopped_before_its_shards(stage: Stage) -> None:
    drains = "def drain():\n    import time; time.sleep(0.5); say('router-drained')"
    supervisor = stage.supervisor(stage.shard(), stage.router(change=drains))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(supervisor.run())
        assert [await stage.next_word() for _ in range(2)] == ["shard-listens", "router-listens"]
        task.cancel()
        assert [await stage.next_word() for _ in range(3)] == ["router-stops", "router-drained", "shard-stops"]
    assert not stage.socket.exists()


async def test_a_shard_that_dies_while_loading_fails_the_start(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    dies = "async def serve(health, stop): print('no such weights', flush=True); sys.exit(4)"
    with pytest.raises(ExceptionGroup) as error:
        await stage.supervisor(stage.shard(change=dies), stage.router()).run()
    assert error.group_contains(ChildFailed)
    output = "".join(capfd.readouterr())
    assert "shard failed to start" in output
    assert "exit_code=4" in output
    assert "shard-0: no such weights" in output


async def test_a_router_that_dies_while_starting_stops_the_shard(stage: Stage) -> None:
    with pytest.raises(ExceptionGroup) as error:
        await stage.supervisor(stage.shard(), stage.router(change="def main(): sys.exit(4)")).run()
    assert error.group_contains(ChildFailed, depth=2)
    assert [await stage.next_word() for _ in range(2)] == ["shard-listens", "shard-stops"]
