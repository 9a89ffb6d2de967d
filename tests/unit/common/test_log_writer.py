"""The log's writer drops and counts lines where its file descriptor fails or stalls, and goes on when it works again."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from text_generation_common.log_writer import LogWriter

LINE = b"%05d " + b"x" * 93 + b"\n"
LENGTH = len(LINE % 0)
LIMIT = 40 * LENGTH + 10
"""Bytes that a file may have: a line is cut there."""


def report(lines: int) -> bytes:
    return b"dropped %d\n" % lines


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_stalled_reader_blocks_nothing_and_misses_only_the_oldest_lines(blocking: bool) -> None:
    """Also where somebody else made the pipe non-blocking."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, blocking)
    writer = LogWriter(write_fd, report, queue_bytes=100 * LENGTH)
    total = 5000
    for number in range(total):
        writer.write(LINE % number)
    writer.drain(0.01)  # returns although nothing is read
    assert writer.dropped > 3000
    received = b""
    while LINE % (total - 1) not in received:
        received += os.read(read_fd, 1 << 16)
    missing, expected = 0, 0
    for line in received.splitlines(keepends=True):
        if line.startswith(b"dropped "):
            missing += int(line.split()[1])
        else:
            assert line == LINE % (expected + missing)  # the number of missing lines is where they are missing
            expected += 1
    assert missing == writer.dropped == total - expected
    assert all(LINE % number in received for number in range(total - 100, total))


def test_a_full_disk_costs_lines_until_there_is_space_again(tmp_path: Path) -> None:
    """The report does not need another line, and no line is joined to the half of an older one."""
    path = tmp_path / "log"
    with path.open("ab") as file:
        writer = LogWriter(file.fileno(), report)
        with file_limit(LIMIT):
            for number in range(1000):
                writer.write(LINE % number)
            until(lambda: writer.dropped == 960)
            assert path.stat().st_size == LIMIT
        until(lambda: path.read_bytes().endswith(report(960)))
        writer.write(LINE % 1000)
        writer.drain()
        writer.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines == [*(LINE % n for n in range(40)), (LINE % 40)[:10] + b"\n", report(960), LINE % 1000]


def test_a_closed_pipe_costs_lines_only() -> None:
    read_fd, write_fd = os.pipe()
    later_read_fd, later_write_fd = os.pipe()
    os.close(read_fd)
    writer = LogWriter(write_fd, report)
    for number in range(3):
        writer.write(LINE % number)
    until(lambda: writer.dropped == 3)
    os.close(write_fd)
    writer.write(LINE % 3)
    until(lambda: writer.dropped == 4)
    os.dup2(later_write_fd, write_fd)  # the writer would write to the next file with this number
    assert os.read(later_read_fd, 100) == report(4)
