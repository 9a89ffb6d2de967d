"""One child of the launcher: its output, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from fake_children import Journal, child

from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ChildSpec
from text_generation_launcher.shutdown import GracefulShutdown

pytestmark = pytest.mark.system

IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: say('asked'))\n"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path)
    yield journal
    journal.close()


async def run(spec: ChildSpec, stop: GracefulShutdown) -> int:
    return await run_to_end(spec, stop.grace_period)


async def test_output_is_forwarded_in_whole_lines_also_after_the_childs_end(
    journal: Journal, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = """
import os, subprocess, sys
until_i_end, _ = os.pipe()
late = f"import os; os.read({until_i_end}, 1); print('late output')"
subprocess.Popen([sys.executable, "-S", "-c", late], pass_fds=[until_i_end], start_new_session=True)
os.write(1, b"one\\ntwo")
os.write(2, b" and more\\n\\xff\\xfe\\n" + b"y" * 60_000 + b"\\n")
os._exit(3)
"""
    assert await run(child("shard-0", journal, script), GracefulShutdown()) == 3
    lines = capfdbinary.readouterr().err.splitlines()
    expected = [b"one", b"two and more", b"\\xff\\xfe", b"y" * 60_000, b"late output"]
    assert lines == [b"shard-0: " + line for line in expected]


async def test_dead_childs_process_group_is_killed(journal: Journal) -> None:
    script = "import os, subprocess; worker = subprocess.Popen(['sleep', '60'])\n"
    script += "say(f'{os.getpid()} {os.getpgrp()} {worker.pid}'); os._exit(9)"
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run(child("shard-0", journal, script), GracefulShutdown()))
        pid, group, worker = (int(word) for word in (await journal.next()).split())
    assert task.result() == 9
    assert pid == group != os.getpgrp()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(worker).wait(5)


async def test_child_that_exceeds_its_stop_timeout_is_killed(journal: Journal) -> None:
    script = IGNORES_SIGTERM + "import os; say(str(os.getpid()))\nwhile True: time.sleep(60)"
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run(child("shard-0", journal, script, stop_timeout=1.0), GracefulShutdown()))
        pid = int(await journal.next())
        task.cancel()
        assert await journal.next() == "asked"
    assert not psutil.pid_exists(pid)


async def test_a_second_cancellation_leaves_no_child_behind(journal: Journal) -> None:
    """The first one: another shard of its group ended; the second: the launcher stops."""
    script = IGNORES_SIGTERM + "import os; say(str(os.getpid()))\nwhile True: time.sleep(60)"
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run(child("shard-0", journal, script, stop_timeout=1.0), GracefulShutdown()))
        pid = int(await journal.next())
        for _ in range(2):
            task.cancel()
            if task.cancelling() == 1:
                assert await journal.next() == "asked"
    assert task.cancelled()
    assert not psutil.pid_exists(pid)


async def test_second_signal_terminates_again_and_shortens_the_grace_period(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("text_generation_launcher.shutdown.FORCED_GRACE", 1.0)
    stop = GracefulShutdown()
    script = IGNORES_SIGTERM + "say('runs')\nwhile True: time.sleep(60)"
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(30):
        task = tasks.create_task(run(child("shard-0", journal, script, stop_timeout=60.0), stop))
        assert await journal.next() == "runs"
        stop.receive(signal.SIGINT)
        task.cancel()
        assert await journal.next() == "asked"
        stop.receive(signal.SIGINT)
        assert await journal.next() == "asked"
        await asyncio.wait([task])
