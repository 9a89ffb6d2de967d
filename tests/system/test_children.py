"""One child of the launcher: its output, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_children import Journal, child

from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ChildSpec
from text_generation_launcher.shutdown import FORCED_GRACE, GracefulShutdown

pytestmark = pytest.mark.system

IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: say('asked'))\n"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path)
    yield journal
    journal.close()


async def run(spec: ChildSpec, stop: GracefulShutdown | None = None) -> int:
    return await run_to_end(spec, (stop or GracefulShutdown()).grace_period, json_output=False)


async def test_output_of_a_child_is_forwarded_in_whole_lines(
    journal: Journal, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = """
import os, sys
os.write(1, b"one\\ntwo")
os.write(2, b" and more\\n\\xff\\xfe\\n" + b"y" * 2_000_000 + b"\\n")
os.write(1, b"last words")
os._exit(3)
"""
    assert await run(child("shard-0", journal, script)) == 3
    lines = capfdbinary.readouterr().err.splitlines()
    expected = [b"one", b"two and more", b"\xff\xfe", b"y" * 2_000_000, b"last words"]
    assert lines == [b"shard-0: " + line for line in expected]


async def test_output_after_the_childs_end_is_forwarded(
    journal: Journal, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = """
import os, subprocess, sys
until_i_end, _ = os.pipe()
late = f"import os; os.read({until_i_end}, 1); print('late output')"
subprocess.Popen([sys.executable, "-S", "-c", late], pass_fds=[until_i_end], start_new_session=True)
os._exit(0)
"""
    assert await run(child("shard-0", journal, script)) == 0
    assert capfdbinary.readouterr().err == b"shard-0: late output\n"


async def test_child_leads_its_own_process_group(journal: Journal) -> None:
    async with asyncio.TaskGroup() as tasks:
        script = "import os, time; say(f'{os.getpid()} {os.getpgrp()}'); time.sleep(60)"
        task = tasks.create_task(run(child("shard-0", journal, script)))
        pid, group = (await journal.next()).split()
        assert pid == group != str(os.getpgrp())
        task.cancel()


async def test_cancelling_sends_sigterm(journal: Journal) -> None:
    script = "import signal, time\ndef stop(*_):\n    say('stopped'); raise SystemExit\nsignal.signal(signal.SIGTERM, stop)\n"
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run(child("shard-0", journal, script + "say('runs'); time.sleep(60)")))
        assert await journal.next() == "runs"
        task.cancel()
        assert await journal.next() == "stopped"


async def test_child_that_exceeds_its_stop_timeout_is_killed(journal: Journal) -> None:
    script = IGNORES_SIGTERM + "import os; say(str(os.getpid()))\nwhile True: time.sleep(60)"
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run(child("shard-0", journal, script, stop_timeout=0.2)))
        pid = int(await journal.next())
        task.cancel()
        assert await journal.next() == "asked"
    assert not psutil.pid_exists(pid)


async def test_second_signal_terminates_again_and_shortens_the_grace_period(journal: Journal) -> None:
    stop = GracefulShutdown()
    script = IGNORES_SIGTERM + "say('runs')\nwhile True: time.sleep(60)"
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run(child("shard-0", journal, script, stop_timeout=60.0), stop))
        assert await journal.next() == "runs"
        stop.receive(signal.SIGINT)
        task.cancel()
        assert await journal.next() == "asked"
        forced = loop.time()
        stop.receive(signal.SIGINT)
        assert await journal.next() == "asked"
    assert loop.time() - forced < FORCED_GRACE + 5


async def test_grace_period_that_begins_after_a_second_signal_is_short(journal: Journal) -> None:
    stop = GracefulShutdown()
    stop.receive(signal.SIGTERM)
    stop.receive(signal.SIGTERM)
    script = IGNORES_SIGTERM + "say('runs')\nwhile True: time.sleep(60)"
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run(child("shard-0", journal, script, stop_timeout=60.0), stop))
        assert await journal.next() == "runs"
        task.cancel()
        assert await journal.next() == "asked"


async def test_process_group_of_a_dead_child_is_killed(journal: Journal) -> None:
    script = "import os, subprocess; say(str(subprocess.Popen(['sleep', '60']).pid)); os._exit(9)"
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run(child("shard-0", journal, script)))
        worker = psutil.Process(int(await journal.next()))
    assert task.result() == 9
    worker.wait(5)
