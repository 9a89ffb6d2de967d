from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from text_generation_proto.process import (
    LIFELINE_GRACE,
    PRIVATE_FOLDER_PREFIX,
    ProcessConfig,
    SocketInUse,
    claim_socket,
    parse_config,
    remove_socket,
    socket_path,
)


class Config(ProcessConfig, cli_prog_name="tester"):
    """Settings of a process."""

    size: int = 3
    """How much."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: the name of a unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


def stale_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return path


def test_settings_come_from_flag_then_environment_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_config(Config, []).size == 3
    monkeypatch.setenv("SIZE", "4")
    assert parse_config(Config, []).size == 4
    assert parse_config(Config, ["--size", "5"]).size == 5


def test_the_lifeline_is_set_by_flag_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFELINE_FD", "9")
    assert parse_config(Config, []).lifeline_fd == -1
    assert parse_config(Config, ["--lifeline-fd", "9"]).lifeline_fd == 9


def test_of_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "4")
    monkeypatch.setenv("LOG_LEVEL", "debug")
    assert Config.of() == Config.of(size=3, log_level="info")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["--size", "many"],
            "--size (or SIZE): Input should be a valid integer, unable to parse string as an integer, not 'many'",
        ),
        (["--siz", "1"], "unrecognized arguments: --siz 1"),
        (["--size"], "argument --size: expected one argument"),
    ],
)
def test_nonsense_is_one_line_and_exit_code_2(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_config(Config, argv)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"tester: error: {error}\n"


def test_only_unix_addresses_have_a_path() -> None:
    assert socket_path("unix:///tmp/x") == Path("/tmp/x")
    assert socket_path("127.0.0.1:5000") is None


def test_a_stale_socket_makes_way(folder: Path) -> None:
    path = stale_socket(folder / "s")
    claim_socket(path)
    assert not path.exists()
    claim_socket(path)


def test_a_live_socket_is_not_taken(folder: Path) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(SocketInUse, match="a server already listens"):
            claim_socket(path)
    assert path.exists()


def test_a_file_in_the_sockets_place_is_not_removed(folder: Path) -> None:
    path = folder / "s"
    path.write_text("precious")
    with pytest.raises(SocketInUse, match="is no socket"):
        claim_socket(path)
    assert path.read_text() == "precious"


def test_a_private_folder_comes_with_its_first_socket_and_goes_with_its_last(folder: Path) -> None:
    private = folder / f"{PRIVATE_FOLDER_PREFIX}x"
    for name in ("1", "2"):
        claim_socket(private / name)
    assert private.stat().st_mode & 0o777 == 0o700
    one, two = stale_socket(private / "1"), stale_socket(private / "2")
    remove_socket(one)
    assert private.exists()
    remove_socket(two)
    assert not private.exists()
    remove_socket(two)


def test_any_other_folder_stays(folder: Path) -> None:
    remove_socket(stale_socket(folder / "s"))
    assert folder.exists()


CHILD = """
import signal, sys, time
from pathlib import Path
from text_generation_proto.process import follow_parent
follow_parent({fd}, last_will=Path({will!r}).touch)
{rest}
"""


def start_child(read_fd: int, will: Path, rest: str) -> subprocess.Popen[bytes]:
    code = CHILD.format(fd=read_fd, will=str(will), rest=rest)
    child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[read_fd], stdout=subprocess.PIPE, process_group=0)
    assert child.stdout is not None
    assert child.stdout.read(1) == b"."
    return child


def cut(write_fd: int, child: subprocess.Popen[bytes]) -> int:
    """Let the lifeline go; how the child ended."""
    with child:
        os.close(write_fd)
        return child.wait(timeout=LIFELINE_GRACE + 5)


def test_a_child_that_is_starting_stops_with_its_parent(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    child = start_child(read_fd, tmp_path / "will", "print('.', end='', flush=True); time.sleep(60)")
    os.close(read_fd)
    assert cut(write_fd, child) == 0
    assert (tmp_path / "will").exists()


def test_a_child_that_heeds_sigterm_stops_in_its_own_way(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    rest = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('.', end='', flush=True); time.sleep(60)"
    child = start_child(read_fd, tmp_path / "will", rest)
    os.close(read_fd)
    assert cut(write_fd, child) == 5
    assert not (tmp_path / "will").exists()


def test_a_child_that_hangs_is_killed_with_all_it_started_and_its_last_will_done(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    rest = """
import subprocess
worker = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: None)
print(".", worker.pid, sep="", flush=True)
while True:
    time.sleep(60)
"""
    child = start_child(read_fd, tmp_path / "will", rest)
    os.close(read_fd)
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    worker_fd = os.pidfd_open(worker)
    assert cut(write_fd, child) == -signal.SIGKILL
    assert (tmp_path / "will").exists()
    # A process descriptor is readable when the process has ended.
    assert select.select([worker_fd], [], [], 5)[0]
    os.close(worker_fd)


def test_a_child_that_was_stopped_wakes_and_stops(tmp_path: Path) -> None:
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
    child = CHILD.format(fd="FD", will=str(tmp_path / "will"), rest="print('.', end='', flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", script, child], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_fd = os.pidfd_open(int(parent.stdout.readline()))
    assert select.select([child_fd], [], [], 10)[0]
    os.close(child_fd)
    assert (tmp_path / "will").exists()


def test_output_after_the_parents_death_goes_nowhere_and_breaks_nothing(tmp_path: Path) -> None:
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
    child = start_child(read_fd, tmp_path / "will", rest)
    os.close(read_fd)
    assert child.stdout is not None
    child.stdout.close()
    assert cut(write_fd, child) == 5
    assert (tmp_path / "stopped").exists()


def test_without_a_lifeline_nothing_is_followed() -> None:
    code = "from text_generation_proto.process import follow_parent; follow_parent(-1); import threading; "
    code += "print(threading.active_count())"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"1\n"
