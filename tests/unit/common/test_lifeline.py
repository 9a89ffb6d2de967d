from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from text_generation_common.lifeline import LIFELINE_GRACE

CHILD = """
import signal, sys, time
from pathlib import Path
from text_generation_common.lifeline import follow_parent
follow_parent({fd}, cleanup=Path({marker!r}).touch)
{rest}
"""


SLEEP = "print('.', end='', flush=True); time.sleep(60)"


class Child:
    """A process that follows its parent, and the lifeline between them."""

    def __init__(self, marker: Path, rest: str) -> None:
        read_fd, self._write_fd = os.pipe()
        code = CHILD.format(fd=read_fd, marker=str(marker), rest=rest)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[read_fd], stdout=subprocess.PIPE, process_group=0
        )
        os.close(read_fd)
        assert self._process.stdout is not None
        self.stdout = self._process.stdout
        assert self.stdout.read(1) == b"."

    def cut(self) -> int:
        """Close the lifeline and return the child's exit code."""
        with self._process:
            os.close(self._write_fd)
            return self._process.wait(timeout=LIFELINE_GRACE + 5)


def test_starting_child_runs_cleanup_and_exits_when_its_parent_dies(tmp_path: Path) -> None:
    assert Child(tmp_path / "cleaned", SLEEP).cut() == 0
    assert (tmp_path / "cleaned").exists()


def test_child_with_its_own_sigterm_handler_stops_without_cleanup_or_output(tmp_path: Path) -> None:
    rest = f"""
def stop(*_):
    print("stopping", flush=True)
    Path({str(tmp_path / "stopped")!r}).touch()
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
{SLEEP}
"""
    child = Child(tmp_path / "cleaned", rest)
    child.stdout.close()
    assert child.cut() == 5
    assert (tmp_path / "stopped").exists()
    assert not (tmp_path / "cleaned").exists()


def test_hanging_child_is_killed_with_its_process_group_after_cleanup(tmp_path: Path) -> None:
    rest = """
import subprocess
worker = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: None)
print(".", worker.pid, sep="", flush=True)
while True:
    time.sleep(60)
"""
    child = Child(tmp_path / "cleaned", rest)
    worker_fd = os.pidfd_open(int(child.stdout.readline()))
    assert child.cut() == -signal.SIGKILL
    assert (tmp_path / "cleaned").exists()
    # A process descriptor is readable when the process has ended.
    assert select.select([worker_fd], [], [], 5)[0]
    os.close(worker_fd)


def test_child_stopped_by_sigstop_wakes_and_exits(tmp_path: Path) -> None:
    script = """
import os, subprocess, sys
read_fd, write_fd = os.pipe()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1].replace("FD", str(read_fd))], pass_fds=[read_fd],
                         stdout=subprocess.PIPE)
child.stdout.read(1)
child.send_signal(19)
print(child.pid, flush=True)
os.waitid(os.P_PID, child.pid, os.WSTOPPED)
os._exit(0)
"""
    child = CHILD.format(fd="FD", marker=str(tmp_path / "cleaned"), rest=SLEEP)
    with subprocess.Popen([sys.executable, "-c", script, child], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_fd = os.pidfd_open(int(parent.stdout.readline()))
    assert select.select([child_fd], [], [], 10)[0]
    os.close(child_fd)
    assert (tmp_path / "cleaned").exists()


def test_no_thread_is_started_without_a_lifeline() -> None:
    code = "from text_generation_common.lifeline import follow_parent; follow_parent(-1); import threading; "
    code += "print(threading.active_count())"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"1\n"
