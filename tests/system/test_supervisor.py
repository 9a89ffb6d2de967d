"""Order of start and stop, with fake shards and router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from fake_children import FakeServer, fake_server

from text_generation_launcher.child import ChildFailed
from text_generation_launcher.shard_restarts import RestartPolicy

pytestmark = pytest.mark.system

POLICY = RestartPolicy()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


async def test_router_starts_when_the_shard_serves_and_stops_before_it(server: FakeServer) -> None:
    server.router_change = "def drain():\n    import time; time.sleep(0.5); say('router-drained')"
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(server.supervisor(POLICY, server.shard(0)).run())
        await server.wait_for("router-listens")
        task.cancel()
        await server.wait_for("shard-0 stops")
    pid = server.pids["shard-0"]
    started = ["shard-listens", f"shard-0 serves {pid}", "router-listens"]
    assert server.messages == [*started, "router-stops", "router-drained", "shard-0 stops"]
    assert not (server.folder / "s0").exists()


async def test_router_waits_for_a_shard_that_only_listens(server: FakeServer) -> None:
    server.fail(0, "hangs")
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(server.supervisor(POLICY, server.shard(0)).run())
        await server.wait_for("shard-0 hangs")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.log.next("shards serve"), 0.3)
        task.cancel()
        await server.wait_for("shard-0 stops")
    assert "router-listens" not in server.messages


async def test_shard_that_dies_while_loading_fails_the_start(
    server: FakeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    dies = "async def serve(health, stop): print('no such weights', flush=True); sys.exit(4)"
    with pytest.raises(ExceptionGroup) as error:
        await server.supervisor(POLICY, server.shard(0, change=dies)).run()
    assert error.group_contains(ChildFailed)
    assert (await server.log.next("shard failed to start"))["exit_code"] == 4
    assert "shard-0: no such weights" in capfd.readouterr().err


async def test_router_that_dies_while_starting_stops_the_shard(server: FakeServer) -> None:
    server.router_change = "def main(): sys.exit(4)"
    with pytest.raises(ExceptionGroup) as error:
        await server.supervisor(POLICY, server.shard(0)).run()
    assert error.group_contains(ChildFailed, depth=2)
    assert (await server.log.next("router failed to start"))["exit_code"] == 4
    await server.wait_for("shard-0 stops")
