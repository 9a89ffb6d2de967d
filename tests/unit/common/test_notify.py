from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from text_generation_common.notify import Notifier

NAME = f"text-generation-test-{os.getpid()}"


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{NAME}")  # a service manager in a container may use an abstract socket
        manager.settimeout(0)
        yield manager


def received(manager: socket.socket) -> list[str]:
    lines: list[str] = []
    while True:
        try:
            lines += manager.recv(4096).decode().split("\n")
        except BlockingIOError:
            return lines


def test_messages_wait_for_room_in_the_queue_and_status_is_one_line(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": f"@{NAME}"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            while True:
                other.sendto(b"", f"\0{NAME}")
    notifier.show(lambda: "loading\nREADY=0")
    notifier.ready()
    assert [line for line in received(manager) if line] == []
    notifier.beat()
    assert sorted(received(manager)) == ["READY=1", "STATUS=loading READY=0"]
    notifier.beat()
    assert received(manager) == []


@pytest.mark.parametrize(("pid", "expected"), [(None, ["WATCHDOG=1"]), (1, [])])
def test_only_the_watched_process_sends_to_the_watchdog(
    manager: socket.socket, pid: int | None, expected: list[str]
) -> None:
    environ = {"NOTIFY_SOCKET": f"@{NAME}", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(pid or os.getpid())}
    notifier = Notifier(environ)
    notifier.beat()
    notifier.beat()  # too early for a second message
    assert received(manager) == expected
