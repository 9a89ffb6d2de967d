"""A shard whose ranks mpirun starts, with fakes of mpirun and of TensorRT-LLM's script.

The fake mpirun behaves like that of Open MPI 4.1: it closes inherited descriptors, starts its ranks in process groups of
their own, ends all if one fails, and on SIGTERM sends SIGTERM to all and SIGKILL a second later. The fake script behaves
like tensorrt_llm/llmapi/trtllm-llmapi-launch: rank 0 runs the program without MPI's variables, beside a server that ends
all ranks after the program has succeeded, and never otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_children import TIMEOUT, Journal
from stack import still_running

from text_generation_common.exit_codes import ExitCode
from text_generation_common.lifeline import open_lifeline
from text_generation_launcher import mpi, orphans
from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ChildSpec
from text_generation_launcher.shutdown import GracefulShutdown

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="TensorRT-LLM runs on Linux, and so does what is tested here"),
]

SHEBANG = f"#!{sys.executable}\n"
SEND = """
import json, os
def send(**words):
    with open(os.environ["JOURNAL"], "a") as file: file.write(json.dumps(words) + "\\n")
"""
MPIRUN = """
import os, signal, subprocess, sys, time
words = sys.argv[1:]
assert words[0] == "-n" and words[2:5] == ["--oversubscribe", "--bind-to", "none"]
size, program = int(words[1]), words[5:]
ranks = [
    subprocess.Popen(program, process_group=0, env=os.environ | {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), "PMIX_RANK": str(rank),
    })
    for rank in range(size)
]
def end(*_):
    for number, seconds in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 0.0)):
        for rank in ranks:
            if rank.poll() is None: os.killpg(rank.pid, number)
        time.sleep(seconds)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
left = len(ranks)
while left:
    pid, status = os.waitpid(-1, 0)
    left -= 1
    for rank in ranks:
        if rank.pid == pid: rank.returncode = status
    if status: end()
"""
SCRIPT = """
import os, signal, subprocess, sys
assert "SHARD_TOKEN" not in os.environ
rank, size = (int(os.environ["OMPI_COMM_WORLD_" + name]) for name in ("RANK", "SIZE"))
folder = os.environ["RANKS"]
with open(f"{folder}/pid-{rank}", "w") as file: file.write(str(os.getpid()))
send(rank=rank, pid=os.getpid(), parent=os.getppid())
if rank:
    open(f"{folder}/stop-{rank}").read()
    sys.exit()
environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
environ |= {"TLLM_SPAWN_PROXY_PROCESS": "1", "tllm_mpi_size": str(size), "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR": "tcp://here"}
program = " ".join(sys.argv[1:]).split()  # as an unquoted variable does
if subprocess.run(program, env=environ).returncode:
    signal.pause()
for other in range(1, size):
    open(f"{folder}/stop-{other}", "w").close()
send(ranks="end in order")
"""
SHARD = """
import os, signal, stat, sys
def stop(*_):
    send(shard="stops", ranks_there=[is_there(rank) for rank in (0, 1)])
    os._exit(0)
def is_there(rank):
    with open(f"{os.environ['RANKS']}/pid-{rank}") as file: pid = int(file.read())
    try: os.kill(pid, 0)
    except ProcessLookupError: return False
    return True
def has_lifeline():
    try: return stat.S_ISFIFO(os.fstat(int(os.environ["LIFELINE"])).st_mode)
    except OSError: return False
signal.signal(signal.SIGTERM, stop)
who = {"pid": os.getpid(), "parent": os.getppid()}
send(shard="runs", **who, environ=dict(os.environ), words=sys.argv[1:], has_lifeline=has_lifeline())
"""
WAITING_SHARD = SHARD + "signal.pause()\n"


class FakeMpi:
    """The fake programs and their messages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "bin").mkdir()
        self.write("mpirun", MPIRUN)
        self.write("trtllm-llmapi-launch", SEND + SCRIPT)
        os.mkfifo(folder / "stop-1")
        self.journal = Journal(folder)

    def write(self, name: str, script: str) -> None:
        """Write a program."""
        path = self._folder / "bin" / name
        path.write_text(SHEBANG + script)
        path.chmod(0o755)

    def spec(self, lifeline_fd: int, shard: str, *words: str) -> ChildSpec:
        """Return the process that runs mpirun and the shard."""
        environ = {
            **os.environ,
            "SHARD_TOKEN": "hush",
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "RANKS": str(self._folder),
            "JOURNAL": str(self.journal.path),
            "LIFELINE": str(lifeline_fd),
        }
        argv = (
            *(sys.executable, "-P", "-m", "text_generation_launcher.mpi", f"--lifeline-fd={lifeline_fd}"),
            *("--", *mpi.mpirun_command(2, as_root=False, hosts=(), environ=environ)),
            *("--", sys.executable, "-c", SEND + shard, *words),
        )
        return ChildSpec("shard-0", argv, environ, (lifeline_fd,), stop_timeout=60.0)

    async def next(self) -> dict[str, Any]:
        """Wait for the next message."""
        message: dict[str, Any] = json.loads(await self.journal.next())
        return message


@pytest.fixture
def mpi_programs(tmp_path: Path) -> Iterator[FakeMpi]:
    mpi_programs = FakeMpi(tmp_path)
    yield mpi_programs
    mpi_programs.journal.close()


class Started:
    """A shard and its ranks, after each has sent a message."""

    def __init__(self, task: asyncio.Task[int], messages: list[dict[str, Any]]) -> None:
        self.task = task
        (self.shard,) = (message for message in messages if "shard" in message)
        self.ranks = {message["rank"]: message["pid"] for message in messages if "rank" in message}
        self.mpirun = next(message["parent"] for message in messages if "rank" in message)
        self.processes = []
        for pid in (self.mpirun, self.shard["parent"], self.shard["pid"], *self.ranks.values()):
            with suppress(psutil.NoSuchProcess):
                self.processes.append(psutil.Process(pid))

    async def all_gone(self) -> None:
        """Check that all processes have ended."""
        assert await asyncio.to_thread(still_running, self.processes, TIMEOUT) == []


@asynccontextmanager
async def started(mpi_programs: FakeMpi, shard: str, *words: str) -> AsyncIterator[Started]:
    """Run a shard with two ranks."""
    with open_lifeline() as lifeline_fd:
        async with asyncio.TaskGroup() as tasks:
            spec = mpi_programs.spec(lifeline_fd, shard, *words)
            task = tasks.create_task(run_to_end(spec, GracefulShutdown().grace_period))
            yield Started(task, [await mpi_programs.next() for _ in range(3)])
            task.cancel()


async def test_shard_has_the_environment_of_rank_0_and_its_lifeline_and_stops_before_its_ranks(
    mpi_programs: FakeMpi,
) -> None:
    async with started(mpi_programs, WAITING_SHARD, "a b", "*") as running:
        environ = running.shard["environ"]
        assert (environ["TLLM_SPAWN_PROXY_PROCESS"], environ["tllm_mpi_size"]) == ("1", "2")
        assert environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"] == "tcp://here"
        assert environ["SHARD_TOKEN"] == "hush"
        assert not [name for name in environ if name.startswith(("OMPI_", "PMIX_", "TEXT_GENERATION_HANDOVER"))]
        assert running.shard["words"] == ["a b", "*"], "unchanged by a shell"
        assert running.shard["has_lifeline"], "mpirun would have closed it"
        assert sorted(running.ranks) == [0, 1]
    assert await mpi_programs.next() == {"shard": "stops", "ranks_there": [True, True]}
    assert await mpi_programs.next() == {"ranks": "end in order"}
    await running.all_gone()


@pytest.mark.parametrize("code", [0, 70])
async def test_exit_code_is_that_of_the_shard(code: int, mpi_programs: FakeMpi) -> None:
    async with started(mpi_programs, SHARD + f"os._exit({code})\n") as running:
        assert await running.task == code
        await running.all_gone()


async def test_killed_shard_ends_the_ranks(mpi_programs: FakeMpi) -> None:
    async with started(mpi_programs, WAITING_SHARD) as running:
        os.kill(running.shard["pid"], signal.SIGKILL)
        assert await running.task == 128 + signal.SIGKILL
        assert await mpi_programs.next() == {"ranks": "end in order"}
        await running.all_gone()


@pytest.mark.parametrize("rank", [0, 1])
async def test_dead_rank_ends_the_shard(rank: int, mpi_programs: FakeMpi) -> None:
    async with started(mpi_programs, WAITING_SHARD) as running:
        os.kill(running.ranks[rank], signal.SIGKILL)
        assert (await mpi_programs.next())["shard"] == "stops"
        assert await running.task == ExitCode.FAILED
        await running.all_gone()


@pytest.mark.full
async def test_shard_that_does_not_stop_without_its_ranks_is_killed(mpi_programs: FakeMpi) -> None:
    deaf = SHARD + "signal.signal(signal.SIGTERM, lambda *_: None)\nwhile True: signal.pause()\n"
    async with started(mpi_programs, deaf) as running:
        os.kill(running.mpirun, signal.SIGKILL)
        assert await running.task == ExitCode.FAILED
        await running.all_gone()


async def test_failed_mpirun_is_a_failed_shard(
    mpi_programs: FakeMpi, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    mpi_programs.write("mpirun", "import sys; sys.exit('there are not enough slots')\n")
    with open_lifeline() as lifeline_fd:
        spec = mpi_programs.spec(lifeline_fd, WAITING_SHARD)
        assert await run_to_end(spec, GracefulShutdown().grace_period) == ExitCode.FAILED
    output = capfdbinary.readouterr().err
    assert b"there are not enough slots" in output
    assert b"mpirun ended before the ranks were there" in output


async def test_killed_mpi_process_leaves_nothing_behind(mpi_programs: FakeMpi) -> None:
    async with started(mpi_programs, WAITING_SHARD) as running:
        os.kill(running.shard["parent"], signal.SIGKILL)
        assert await running.task == -signal.SIGKILL
        await running.all_gone()


async def test_killed_launcher_leaves_no_ranks_behind(mpi_programs: FakeMpi) -> None:
    read_fd, write_fd = os.pipe()
    mark = secrets.token_hex()
    spec = mpi_programs.spec(read_fd, WAITING_SHARD)
    process = await asyncio.create_subprocess_exec(
        *spec.argv, env={**spec.env, orphans.VARIABLE: mark}, pass_fds=(read_fd,), process_group=0
    )
    processes = [psutil.Process((await mpi_programs.next())["pid"]) for _ in range(3)]
    os.close(write_fd)  # as the kernel does when the launcher dies
    os.close(read_fd)
    await process.wait()
    assert await asyncio.to_thread(still_running, processes, TIMEOUT) == []
    assert orphans.find(mark) == []


async def test_environment_from_another_user_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    relay = mpi.relay_command()
    assert await mpi.run(relay, [sys.executable, "-c", ""], inherited=()) == ExitCode.FAILED
