from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from text_generation_proto.lifeline import LIFELINE_GRACE

CHILD = """
import signal, sys, time
from pathlib import Path
from text_generation_proto.lifeline import follow_parent
follow_parent({fd}, cleanup=Path({marker!r}).touch)
{rest}
"""


def start_child(read_fd: int, marker: Path, rest: str) -> subprocess.Popen[bytes]:
    code = CHILD.format(fd=read_fd, marker=str(marker), rest=rest)
    child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[read_fd], stdout=subprocess.PIPE, process_group=0)
    assert child.stdout is not None
    assert child.stdout.read(1) == b"."
    return child


def cut(write_fd: int, child: subprocess.Popen[bytes]) -> int:
    """Close the lifeline and return the child's exit code."""
    with child:
        os.close(write_fd)
        return child.wait(timeout=LIFELINE_GRACE + 5)


def test_starting_child_runs_cleanup_and_exits_when_its_parent_dies(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    child = start_child(read_fd, tmp_path / "cleaned", "print('.', end='', flush=True); time.sleep(60)")
    os.close(read_fd)
    assert cut(write_fd, child) == 0
    assert (tmp_path / "cleaned").exists()


def test_child_with_its_own_sigterm_handler_stops_without_cleanup(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    rest = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('.', end='', flush=True); time.sleep(60)"
    child = start_child(read_fd, tmp_path / "cleaned", rest)
    os.close(read_fd)
    assert cut(write_fd, child) == 5
    assert not (tmp_path / "cleaned").exists()


def test_hanging_child_is_killed_with_its_process_group_after_cleanup(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    rest = """
import subprocess
worker = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: None)
print(".", worker.pid, sep="", flush=True)
while True:
    time.sleep(60)
"""
    child = start_child(read_fd, tmp_path / "cleaned", rest)
    os.close(read_fd)
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    worker_fd = os.pidfd_open(worker)
    assert cut(write_fd, child) == -signal.SIGKILL
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
    child = CHILD.format(
        fd="FD", marker=str(tmp_path / "cleaned"), rest="print('.', end='', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, child], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_fd = os.pidfd_open(int(parent.stdout.readline()))
    assert select.select([child_fd], [], [], 10)[0]
    os.close(child_fd)
    assert (tmp_path / "cleaned").exists()


def test_output_after_the_parents_death_is_discarded(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    rest = f"""
def stop(*_):
    print("stopping", flush=True)
    Path({str(tmp_path / "stopped")!r}).touch()
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
print(".", end="", flush=True)
time.sleep(60)
"""
    child = start_child(read_fd, tmp_path / "cleaned", rest)
    os.close(read_fd)
    assert child.stdout is not None
    child.stdout.close()
    assert cut(write_fd, child) == 5
    assert (tmp_path / "stopped").exists()


def test_no_thread_is_started_without_a_lifeline() -> None:
    code = "from text_generation_proto.lifeline import follow_parent; follow_parent(-1); import threading; "
    code += "print(threading.active_count())"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"1\n"
