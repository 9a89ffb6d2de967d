"""Start, restart and stop of shards and router, with fake shards and router."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
from fake_children import FakeServer, exit_code, fake_server

from text_generation_common.exit_codes import ExitCode
from text_generation_launcher.restarts import RestartPolicy

pytestmark = pytest.mark.system

NEVER_STABLE = 3600.0


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


async def test_shards_start_before_the_router_and_outlive_it(server: FakeServer) -> None:
    """A shard that dies while the router drains is restarted."""
    drained = server.folder / "drained"
    os.mkfifo(drained)
    server.router_change = f"def drain():\n    open({str(drained)!r}).read(); say('router-drained')"
    async with server.running(RestartPolicy(delays=(0.0,)), server.shard(0)) as task:
        first = server.pids["shard-0"]
        task.cancel()
        await server.wait_for("router-stops")
        server.kill(0)
        await server.log.next("shard serves again")
        await server.wait_for("shard-0 serves")
        await asyncio.to_thread(drained.write_text, "")
        await server.wait_for("shard-0 stops")
    starts = [["shard-listens", f"shard-0 serves {pid}"] for pid in (first, server.pids["shard-0"])]
    router, ends = f"router-listens {server.pids['router-listens']}", ["router-drained", "shard-0 stops"]
    assert server.messages == [*starts[0], router, "router-stops", *starts[1], *ends]
    assert not (server.folder / "s0").exists()


async def test_restart_delays_grow_until_the_shards_are_hopeless(server: FakeServer) -> None:
    policy = RestartPolicy(max_restarts=4, delays=(0.01, 0.02, 0.03))
    async with server.running(policy, server.shard(0)) as task:
        server.fail(0, 4)
        server.kill(0)
        assert await task is ExitCode.HOPELESS
    died = server.log.rest("shard died")
    assert [record["exit_code"] for record in died] == [-9, 4, 4, 4, 4]
    assert [record["restart_in_s"] for record in died] == [0.01, 0.02, 0.03, 0.03, None]


async def test_stable_serving_resets_the_failure_streak(server: FakeServer) -> None:
    policy = RestartPolicy(max_restarts=1, delays=(0.0, 3600.0), stable_after=1e-6)
    async with server.running(policy, server.shard(0)):
        for _ in range(2):
            server.kill(0)
            assert (await server.log.next("shard died"))["restart_in_s"] == 0.0
            await server.log.next("shard serves again")
            await server.wait_for("shard-0 serves")


async def test_a_shard_that_was_told_to_stop_is_no_error_in_the_log(server: FakeServer) -> None:
    async with server.running(RestartPolicy(delays=(0.0,)), server.shard(0), server.shard(1)):
        os.kill(server.pids["shard-0"], signal.SIGTERM)
        await server.wait_for("shard-0 stops", "shard-0 serves")
    (ended,) = server.log.rest("shard ended")
    assert (ended["level"], ended["exit_code"], ended["restart_in_s"]) == ("warning", 0, 0.0)


async def test_a_shard_that_ends_for_good_is_an_error_in_the_log(server: FakeServer) -> None:
    async with server.running(RestartPolicy(max_restarts=0), server.shard(0), server.shard(1)):
        os.kill(server.pids["shard-0"], signal.SIGTERM)
        died = await server.log.next("shard died")
        assert (died["level"], died["exit_code"], died["restart_in_s"]) == ("error", 0, None)


async def test_hopeless_shard_is_restarted_while_another_serves(server: FakeServer) -> None:
    """The other one counts as serving even if its own restarts are used up."""
    policy = RestartPolicy(max_restarts=1, delays=(0.0, 0.01), stable_after=NEVER_STABLE)
    async with server.running(policy, server.shard(0), server.shard(1)) as task:
        for _ in range(2):
            server.kill(0)
            await server.log.next("shard serves again")
            await server.wait_for("shard-0 serves")
        server.fail(1, 1)
        server.kill(1)
        for _ in range(4):
            died = await server.log.next("shard died")
            assert (died["replica"], died["restart_in_s"] is not None) == (1, True)
        assert not task.done()
        server.heal(1)
        await server.log.next("shard serves again")
        await server.wait_for("shard-1 serves")
        assert "router-stops" not in server.messages


async def test_a_loading_shard_does_not_count_as_serving(server: FakeServer) -> None:
    """Otherwise two shards that die alternately while loading would never be given up."""
    async with server.running(RestartPolicy(max_restarts=1, delays=(0.0,)), server.shard(0), server.shard(1)) as task:
        server.fail(0, 1)
        server.kill(0)
        for _ in range(2):
            await server.log.next("shard died")
        server.fail(0, "hangs")
        await server.wait_for("shard-0 hangs")
        server.fail(1, 1)
        server.kill(1)
        assert await task is ExitCode.HOPELESS
        await server.wait_for("router-stops", "shard-0 stops")
    assert [name for name in ("s0", "s1") if (server.folder / name).exists()] == []


async def test_usage_error_after_a_restart_is_hopeless_at_once(server: FakeServer) -> None:
    async with server.running(RestartPolicy(delays=(0.0,)), server.shard(0)) as task:
        server.fail(0, int(ExitCode.USAGE))
        server.kill(0)
        assert await task is ExitCode.HOPELESS
    assert [record["exit_code"] for record in server.log.rest("shard died")] == [-9, 2]


async def test_without_restarts_the_death_of_the_last_shard_ends_the_server(server: FakeServer) -> None:
    """The router, which cannot finish its requests, is not given its whole grace period: it gets SIGTERM again."""
    server.router_change = (
        "def drain(): signal.signal(signal.SIGTERM, lambda *_: say('router-asked-again')); signal.pause()"
    )
    async with server.running(RestartPolicy(max_restarts=0, delays=(0.0,)), server.shard(0), server.shard(1)) as task:
        server.kill(1)
        assert (await server.log.next("shard died"))["restart_in_s"] is None
        assert not task.done()
        server.kill(0)
        await server.wait_for("router-stops", "router-asked-again")
        assert await task is ExitCode.DEPENDENCY_LOST
    assert server.messages.count("shard-listens") == 2
    assert not (server.folder / "s0").exists()


async def test_stop_during_a_restart_delay_and_while_a_shard_loads(server: FakeServer) -> None:
    policy = RestartPolicy(delays=(0.0, 3600.0), stable_after=NEVER_STABLE)
    async with server.running(policy, server.shard(0), server.shard(1)) as task:
        server.fail(1, 1)
        server.kill(1)
        for delay in policy.delays:
            assert (await server.log.next("shard died"))["restart_in_s"] == delay
        server.fail(0, "hangs")
        server.kill(0)
        await server.wait_for("shard-0 hangs")
        task.cancel()
        await server.wait_for("shard-0 stops")
    assert task.cancelled()
    assert server.messages[-2:] == ["router-stops", "shard-0 stops"]
    assert not psutil.pid_exists(server.pids["shard-0"])


async def test_failed_process_start_counts_as_a_death(server: FakeServer) -> None:
    shell = server.folder / "sh"
    shell.symlink_to("/bin/sh")
    shard = server.shard(0)
    shard = replace(shard, argv=(str(shell), "-c", 'exec "$0" "$@"', *shard.argv))
    async with server.running(RestartPolicy(max_restarts=1, delays=(0.0,)), shard) as task:
        shell.unlink()
        server.kill(0)
        assert await task is ExitCode.HOPELESS
    assert "No such file" in str(server.log.rest("shard cannot be started"))


async def test_a_router_that_dies_is_restarted_until_it_is_hopeless(server: FakeServer) -> None:
    """The shard is not touched, and a SIGHUP while the router starts waits until it has a handler."""
    gate = server.folder / "gate"
    server.router_change = f"""
if os.path.exists({str(gate)!r}):
    say("router-starts")
    open({str(gate)!r}).read()
signal.signal(signal.SIGHUP, lambda *_: say("router-reloads"))
"""
    async with server.running(RestartPolicy(max_restarts=2, delays=(0.0, 0.01)), server.shard(0)) as task:
        first = server.pids["router-listens"]
        os.mkfifo(gate)
        os.kill(first, signal.SIGKILL)
        assert (await server.log.next("router died"))["signal"] == "SIGKILL"
        await server.wait_for("router-starts")
        server.stop.receive(signal.SIGHUP)
        for _ in range(5):  # a launcher that does not wait passes it on now
            await asyncio.sleep(0)
        await asyncio.to_thread(gate.write_text, "")
        await server.wait_for("router-listens", "router-reloads")
        assert (await server.log.next("router serves again"))["child"] == "router"
        server.fail("router", 3)
        os.kill(server.pids["router-listens"], signal.SIGKILL)
        assert await task is ExitCode.DEPENDENCY_LOST
        await server.wait_for("shard-0 stops")
    died = [(record["exit_code"], record["restart_in_s"]) for record in server.log.rest("router died")]
    assert died == [(-9, 0.0), (3, 0.01), (3, None)], "the first start that failed was the second death in a row"
    assert [each for each in server.messages if each.startswith("shard-0")] == [
        f"shard-0 serves {server.pids['shard-0']}",
        "shard-0 stops",
    ]


async def test_a_death_before_the_server_is_ready_is_no_failed_start_once_it_has_served(server: FakeServer) -> None:
    """A shard that has served, and a worker that starts while another one serves: clients may use the server by then."""
    supervisor = server.supervisor(RestartPolicy(delays=(0.0,)), server.shard(0), workers=2)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(supervisor.run())
        await server.wait_for("worker-0 starts", "worker-1 starts")
        server.kill(0)
        await server.log.next("shard serves again")
        await asyncio.to_thread(server.gate(0).write_text, "")
        await server.wait_for("worker-0 serves")
        os.kill(server.pids["worker-1"], signal.SIGKILL)
        assert (await server.log.next("router died"))["child"] == "worker-1"
        await server.wait_for("worker-1 starts")
        assert not supervisor.ready.is_set()
        await asyncio.to_thread(server.gate(1).write_text, "")
        await supervisor.ready.wait()
        task.cancel()


async def test_a_worker_that_ends_before_any_has_served_fails_the_start_at_once(server: FakeServer) -> None:
    """The router that drains is asked again: nothing will finish what it runs. The log names a limit that may be the reason."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, before[1]))
    server.router_change = "def drain(): signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); signal.pause()"
    supervisor = server.supervisor(RestartPolicy(delays=(0.0,)), server.shard(0), workers=2)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(exit_code(supervisor))
        await server.wait_for("router-listens", "worker-0 starts", "worker-1 starts")
        os.kill(server.pids["worker-1"], signal.SIGKILL)
        assert await asyncio.wait_for(task, 15.0) is ExitCode.FAILED, "the router has 20 seconds to stop"
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"LimitFSIZE={1 << 40}" in (await server.log.next("router failed to start"))["low_limits"]
    assert server.log.rest("child killed") == []


async def test_a_worker_that_never_serves_fails_the_start_once_it_has_no_restart_left(server: FakeServer) -> None:
    """Also beside one that serves: the server would never be ready."""
    supervisor = server.supervisor(RestartPolicy(max_restarts=1, delays=(0.0,)), server.shard(0), workers=2)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(exit_code(supervisor))
        await server.wait_for("worker-0 starts", "worker-1 starts")
        await asyncio.to_thread(server.gate(0).write_text, "")
        await server.wait_for("worker-0 serves")
        os.kill(server.pids["worker-1"], signal.SIGKILL)
        await server.log.next("router died")
        await server.wait_for("worker-1 starts")
        os.kill(server.pids["worker-1"], signal.SIGKILL)
        assert (await server.log.next("router failed to start"))["child"] == "worker-1"
        assert await task is ExitCode.FAILED


async def test_a_drain_ends_when_no_shard_is_left(server: FakeServer) -> None:
    server.router_change = (
        "def drain(): signal.signal(signal.SIGTERM, lambda *_: say('router-asked-again')); signal.pause()"
    )
    async with server.running(RestartPolicy(max_restarts=0), server.shard(0)) as task:
        task.cancel()
        await server.wait_for("router-stops")
        server.kill(0)
        await server.wait_for("router-asked-again")


async def test_a_child_that_serves_for_an_instant_has_served(server: FakeServer) -> None:
    """The launcher learns of its readiness and of its end at the same time."""
    gate = server.gate(0)
    server.router_change = f"""
def main():
    open(FAULT, "w").write("3")
    say(f"router-starts {{os.getpid()}}")
    held = open({str(gate)!r}, "w")
    os.write(int(os.environ[HEARTBEAT]), b"\\n")
    os._exit(9)
"""
    supervisor = server.supervisor(RestartPolicy(max_restarts=1, delays=(0.0,)), server.shard(0))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(exit_code(supervisor))
        await server.wait_for("router-starts")
        gate.read_text()  # until its end, and not in a thread: the event loop is to see nothing before
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(server.pids["router-starts"]).status() != psutil.STATUS_ZOMBIE:
                pass
        assert await task is ExitCode.DEPENDENCY_LOST
    assert [record["exit_code"] for record in server.log.rest("router died")] == [9, 3]
