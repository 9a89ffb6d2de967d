"""Jobs that do not end, use too much memory, crash or fail do not affect the router or the next job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from sandbox_state import pids, waiting_calls
from structlog.testing import capture_logs

from text_generation_router.request import TenantId
from text_generation_router.sandbox.pool import (
    Sandbox,
    SandboxError,
    SandboxOutOfMemory,
    SandboxStackOverflow,
    SandboxTimeout,
)

LONG_TIMEOUT_S = 60.0
"""Time limit of jobs that must finish, also on a busy machine."""
SHORT_TIMEOUT_S = 0.1
"""Time limit of jobs that never end."""


@pytest.fixture(autouse=True)
def _jobs_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@asynccontextmanager
async def a_sandbox(
    factory: str = "obey",
    config: dict[str, object] | None = None,
    *,
    workers: int = 1,
    timeout_s: float = LONG_TIMEOUT_S,
    pipe: Path | None = None,
) -> AsyncIterator[Sandbox]:
    """A sandbox whose workers are ready."""
    async with Sandbox(
        f"sandbox_jobs:{factory}",
        {"pipe": str(pipe)} if pipe else config or {},
        workers=workers,
        timeout_s=timeout_s,
        memory_bytes=128 << 20,
        max_output=3 << 20,
    ) as sandbox:
        await sandbox.ready()
        yield sandbox


def a_pipe(folder: Path) -> Path:
    path = folder / "pipe"
    os.mkfifo(path)
    return path


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - no event says that a process has ended
            await asyncio.sleep(0.001)


async def until_it_runs(pipe: Path) -> None:
    """Return when the job `report` runs."""
    with pipe.open("rb", buffering=0) as file:
        assert await asyncio.to_thread(file.read, 100) == b"running"


async def read(path: str) -> list[str]:
    return (await asyncio.to_thread(Path(path).read_text)).splitlines()


async def until_gone(pid: int) -> None:
    """Return when the router has collected the exit code of this worker."""
    await until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_job_is_created_from_its_config_and_gets_payloads_larger_than_any_socket_buffer(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def main() -> None:
        payload = os.urandom((3 << 20) - 2)
        async with a_sandbox("echo", {"greeting": "ü"}) as sandbox:
            for sent in (payload, b"and on", b""):
                assert await sandbox.call(sent) == "ü".encode() + sent
        async with a_sandbox(timeout_s=SHORT_TIMEOUT_S) as sandbox:
            with pytest.raises(SandboxTimeout):
                await sandbox.call(b"spin")

    run(main())


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        pytest.param("fail one\ntwo\n  three", SandboxError, "^one two three$", id="one line"),
        pytest.param("fail " + "x" * 100_000, SandboxError, "^x{1000}…$", id="of bounded length"),
        pytest.param(f"eat {(3 << 20) + 1}", SandboxError, "the result is longer than 3145728 bytes", id="long result"),
    ],
)
async def test_an_error_of_a_job_leaves_the_worker_running(job: str, error: type[SandboxError], message: str) -> None:
    async with a_sandbox() as sandbox:
        before = pids(sandbox)
        with pytest.raises(error, match=message):
            await sandbox.call(job.encode())
        assert {int(await sandbox.call(b"pid"))} == pids(sandbox) == before


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        ("spin", SandboxTimeout, "took too much CPU time"),
        ("eat 10000000000", SandboxOutOfMemory, "memory"),
        ("eat 130000000", SandboxOutOfMemory, "memory"),
        ("die", SandboxStackOverflow, "^the worker died of SIGSEGV$"),
    ],
)
async def test_a_job_that_takes_too_much_or_crashes_costs_its_worker(
    job: str, error: type[SandboxError], message: str
) -> None:
    async with a_sandbox(timeout_s=SHORT_TIMEOUT_S if job == "spin" else LONG_TIMEOUT_S) as sandbox:
        [before] = pids(sandbox)
        with pytest.raises(error, match=message):
            await sandbox.call(job.encode())
        await until_gone(before)
        after = int(await sandbox.call(b"pid"))
        assert after != before
        assert pids(sandbox) == {after}


async def test_a_worker_has_no_secrets_no_output_a_low_priority_and_ignores_signals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    async with a_sandbox() as sandbox:
        [pid] = pids(sandbox)
        assert b"HF_TOKEN" not in await sandbox.call(b"environment")
        assert psutil.Process(pid).nice() >= min(19, os.nice(0) + 5)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
            assert int(await sandbox.call(b"print")) == pid


FORBIDDEN = [
    "open('/etc/passwd')", "open('{file}', 'w')", "os.listdir('/')", "os.remove('{file}')", "os.mkdir('{file}2')",
    "os.memfd_create('a')", "os.pipe()", "os.dup(0)", "socket.socket(socket.AF_INET)", "socket.socket(socket.AF_UNIX)",
    "os.fork()", "os.execv('/bin/true', ['true'])", "os.kill({router}, 9)", "os.kill(-1, 9)", "os.setuid(0)",
]  # fmt: skip
FORBIDDEN_IN_C = [
    "open(b'/etc/passwd', 0)", "socket(2, 1, 0)", "vfork()", "ptrace(16, {router}, 0, 0)",
    "fcntl(0, 8, {router})",  # F_SETOWN: signals of the descriptor
]  # fmt: skip


async def test_a_job_can_open_nothing_start_nothing_and_reach_no_process(tmp_path: Path) -> None:
    expected = dict.fromkeys(FORBIDDEN, "PermissionError")
    expected |= {f"result = libc.{call}, ctypes.get_errno()": "(-1, 1)" for call in FORBIDDEN_IN_C}
    expected |= {"result = libc.system(b'true')": "32512"}
    file = tmp_path / "file"
    file.touch(mode=0o666)
    outcomes = {}
    async with a_sandbox() as sandbox:
        for attempt in expected:
            code = attempt.format(file=file, router=os.getpid())
            outcomes[attempt] = (await sandbox.call(f"execute {code}".encode())).decode()
    assert outcomes == expected


async def test_a_worker_has_no_privileges_and_lower_limits_than_its_router() -> None:
    async with a_sandbox() as sandbox:
        [pid] = pids(sandbox)
        status = dict(line.split(":\t", 1) for line in await read(f"/proc/{pid}/status"))
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert int(status["CapEff"], 16) == 0
        assert 0 not in map(int, status["Uid"].split())
        limits = {line[:26].strip(): line[26:].split()[:2] for line in await read(f"/proc/{pid}/limits")}
        assert limits["Max file size"] == limits["Max processes"] == ["0", "0"]
        assert int(limits["Max open files"][1]) < 10


async def test_a_measure_that_is_refused_is_logged_once_and_the_others_hold() -> None:
    with capture_logs() as logs:
        async with a_sandbox("without_filter", workers=2) as sandbox:
            for attempt in ("open('/etc/passwd')", "os.fork()"):
                assert (await sandbox.call(f"execute {attempt}".encode())).endswith(b"Error")
    assert [record["refused"] for record in logs] == ["filter calls: [Errno 38] no filter for unknown"]


async def test_other_workers_go_on_while_a_job_does_not_end(tmp_path: Path) -> None:
    pipe = a_pipe(tmp_path)
    async with a_sandbox(pipe=pipe, workers=2) as sandbox, asyncio.TaskGroup() as tasks:
        endless = tasks.create_task(sandbox.call(b"report"))
        await until_it_runs(pipe)
        answers = {await sandbox.call(b"pid") for _ in range(5)}
        assert len(answers) == 1
        assert not endless.done()
        endless.cancel()


async def test_a_job_whose_worker_was_killed_is_done_by_another(tmp_path: Path) -> None:
    pipe = a_pipe(tmp_path)
    async with a_sandbox(pipe=pipe) as sandbox, asyncio.TaskGroup() as tasks:
        [before] = pids(sandbox)
        job = tasks.create_task(sandbox.call(b"wait"))
        await until(lambda: psutil.Process(before).status() == psutil.STATUS_SLEEPING and not waiting_calls(sandbox))
        os.kill(before, signal.SIGKILL)
        await until_gone(before)
        await asyncio.to_thread(pipe.write_text, "done all the same")
        assert await job == b"done all the same"


async def test_a_tenant_whose_jobs_cost_workers_leaves_one_to_others(tmp_path: Path) -> None:
    async with a_sandbox(workers=2, timeout_s=SHORT_TIMEOUT_S) as sandbox, asyncio.TaskGroup() as tasks:
        await sandbox.call(b"pid", TenantId("quiet"))
        noisy = [tasks.create_task(suppressed(sandbox.call(b"spin", TenantId("noisy")))) for _ in range(6)]
        await until(lambda: waiting_calls(sandbox) == 5)
        first = int(await sandbox.call(b"pid", TenantId("quiet")))
        await until(lambda: noisy[1].done())
        assert int(await sandbox.call(b"pid", TenantId("quiet"))) == first
        assert not noisy[-1].done()
        for task in noisy:
            task.cancel()


async def suppressed(job: Coroutine[Any, Any, bytes]) -> None:
    with contextlib.suppress(SandboxTimeout):
        await job


async def test_an_idle_worker_that_dies_is_replaced() -> None:
    async with a_sandbox() as sandbox:
        [before] = pids(sandbox)
        os.kill(before, signal.SIGKILL)
        await until_gone(before)
        assert int(await sandbox.call(b"pid")) != before


async def test_a_waiting_call_that_is_cancelled_is_dropped(tmp_path: Path) -> None:
    pipe = a_pipe(tmp_path)
    async with a_sandbox(pipe=pipe) as sandbox, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(sandbox.call(b"wait"))
        cancelled = tasks.create_task(sandbox.call(b"fail of a cancelled call"))
        await until(lambda: waiting_calls(sandbox) == 1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert waiting_calls(sandbox) == 0
        following = tasks.create_task(sandbox.call(b"pid"))
        await asyncio.to_thread(pipe.write_text, "done")
        assert await running == b"done"
        assert int(await following) in pids(sandbox)


async def test_the_result_of_a_cancelled_call_reaches_no_other_caller(tmp_path: Path) -> None:
    pipe = a_pipe(tmp_path)
    async with a_sandbox(pipe=pipe) as sandbox, asyncio.TaskGroup() as tasks:
        cancelled = tasks.create_task(sandbox.call(b"wait"))
        writing = tasks.create_task(asyncio.to_thread(pipe.write_text, "for a cancelled call"))
        await asyncio.sleep(0)
        cancelled.cancel()
        following = tasks.create_task(sandbox.call(b"pid"))
        await writing
        assert int(await following) in pids(sandbox)


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("broken", SandboxError, r"^this config is nonsense$"),
        ("hungry", SandboxOutOfMemory, "needs more memory"),
        ("nowhere", SandboxError, "has no attribute 'nowhere'"),
    ],
)
async def test_a_factory_or_process_that_fails_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, factory: str, error: type[SandboxError], message: str
) -> None:
    with pytest.raises(error, match=message):
        await a_sandbox(factory, workers=2).__aenter__()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxError, match="a worker cannot be started: No such file or directory"):
        await a_sandbox(factory).__aenter__()


async def test_a_worker_that_is_killed_while_it_starts_is_started_once_more(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    async with a_sandbox("dies", {"file": str(file), "once": True}) as sandbox:
        assert int(await sandbox.call(b"pid")) in pids(sandbox)
    file.touch()
    with pytest.raises(SandboxError, match="the worker died of SIGKILL"):
        await a_sandbox("dies", {"file": str(file), "once": False}).__aenter__()


async def test_calls_fail_while_no_worker_can_start_and_succeed_once_one_can(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    async with a_sandbox("needs_file", {"file": str(file)}) as sandbox:
        file.unlink()
        with pytest.raises(SandboxError):
            await sandbox.call(b"die")
        with pytest.raises(SandboxError, match="the file is gone"):
            await sandbox.call(b"pid")
        with pytest.raises(SandboxError, match="the file is gone"):
            await sandbox.call(b"pid")
        file.touch()
        await until(lambda: bool(pids(sandbox)))
        assert int(await sandbox.call(b"pid")) in pids(sandbox)


async def test_closing_ends_everything(tmp_path: Path) -> None:
    pipe = a_pipe(tmp_path)
    async with a_sandbox(pipe=pipe) as sandbox:
        [pid] = pids(sandbox)

        async def refused(payload: str) -> bool:
            with pytest.raises(SandboxError, match="the sandbox is closed"):
                await sandbox.call(payload.encode())
            return True

        async with asyncio.TaskGroup() as tasks:
            running, waiting = tasks.create_task(refused("report")), tasks.create_task(refused("pid"))
            await until_it_runs(pipe)
            await sandbox.close()
    assert running.result()
    assert waiting.result()
    assert not psutil.pid_exists(pid)
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        await sandbox.call(b"pid")


def test_a_worker_dies_with_its_router_in_the_middle_of_a_job() -> None:
    program = textwrap.dedent("""
        import asyncio, sys
        from text_generation_router.sandbox.pool import Sandbox

        async def main():
            sandbox = Sandbox("sandbox_jobs:obey", {}, workers=1, timeout_s=600, memory_bytes=1 << 28,
                              max_output=1)
            await sandbox.__aenter__()
            await sandbox.ready()
            sandbox.call(b"spin").send(None)
            print(*(worker.process.pid for worker in sandbox._ready), flush=True)
            sys.stdin.read()

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as router:
        assert router.stdout is not None
        worker = psutil.Process(int(router.stdout.readline()))
        router.kill()
    worker.wait(LONG_TIMEOUT_S)


def test_a_worker_imports_only_what_its_job_needs() -> None:
    program = "import sys, text_generation_common.sandbox.worker, text_generation_router.chat.template_job; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout.decode().split()
    )
    assert "jinja2" in loaded
    assert not loaded & {"aiohttp", "grpc", "pydantic", "structlog", "tokenizers", "numpy", "asyncio"}
