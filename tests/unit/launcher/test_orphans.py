from __future__ import annotations

import asyncio
import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from text_generation_common.descriptors import DescriptorReserve
from text_generation_launcher import orphans
from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ChildSpec
from text_generation_launcher.shutdown import GracefulShutdown

SLEEPER = (sys.executable, "-S", "-c", "import time; print('runs', flush=True); time.sleep(600)")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


class Sleeper:
    """A process in its own session."""

    def __init__(self, mark: str) -> None:
        environ = os.environ | {orphans.VARIABLE: mark}
        self.process = subprocess.Popen(SLEEPER, env=environ, stdout=subprocess.PIPE, start_new_session=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it has started, so /proc shows its own environment

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def mark() -> str:
    return secrets.token_hex()


@pytest.fixture
def sleepers(mark: str) -> Iterator[list[Sleeper]]:
    made = [Sleeper(mark), Sleeper(mark), Sleeper(secrets.token_hex())]
    yield made
    for sleeper in made:
        sleeper.close()


async def test_reap_kills_processes_in_other_sessions(mark: str, sleepers: list[Sleeper]) -> None:
    assert sorted(orphans.find(mark)) == sorted(sleeper.process.pid for sleeper in sleepers[:2])
    await orphans.reap(mark, DescriptorReserve(0))
    assert [await asyncio.to_thread(sleeper.process.wait, 30) for sleeper in sleepers[:2]] == [-9, -9]
    assert sleepers[2].process.poll() is None
    assert orphans.find(mark) == []


def test_find_excludes_the_calling_process(mark: str) -> None:
    script = f"from text_generation_launcher import orphans; print(orphans.find({mark!r}))"
    environ = os.environ | {orphans.VARIABLE: mark}
    done = subprocess.run([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_processes_that_left_the_childs_group_end_with_it(tmp_path: Path) -> None:
    """MPI's daemon and its ranks leave the process group."""
    script = f"""
import subprocess, sys
worker = subprocess.Popen({SLEEPER!r}, start_new_session=True, stdout=subprocess.PIPE)
worker.stdout.readline()
open({str(tmp_path / "pid")!r}, "w").write(str(worker.pid))
sys.exit(3)
"""
    spec = ChildSpec("shard-0", (sys.executable, "-c", script), dict(os.environ), (), stop_timeout=60.0)
    assert await run_to_end(spec, GracefulShutdown().grace_period) == 3
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@contextmanager
def no_descriptors_left() -> Iterator[list[int]]:
    """Take all descriptors that this process may have."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 50, limits[1]))
    taken = take_descriptors()
    try:
        yield taken
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def take_descriptors() -> list[int]:
    taken = []
    with pytest.raises(OSError, match="Too many"):
        while True:
            taken.append(os.dup(1))
    return taken


async def test_without_descriptors_a_search_is_given_up_and_a_failed_start_keeps_none() -> None:
    spec = ChildSpec("shard-0", (sys.executable, "-c", ""), dict(os.environ), (), stop_timeout=60.0)
    with no_descriptors_left() as taken:
        await orphans.reap(secrets.token_hex(), DescriptorReserve(0))
        for free in range(4):  # the child needs two pipes, and subprocess one more
            with pytest.raises(OSError, match="Too many"):
                await run_to_end(spec, GracefulShutdown().grace_period)
            await asyncio.sleep(0)  # a transport closes its pipe in the loop's next round
            taken += (again := take_descriptors())
            assert len(again) == free
            for _ in range(free + 1):
                os.close(taken.pop())
