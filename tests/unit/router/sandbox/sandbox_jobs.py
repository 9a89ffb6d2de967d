"""Jobs for the tests of the sandbox. The workers import them by name."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = Callable[[bytes], bytes]


def echo(config: dict[str, Any]) -> Job:
    """Return a job that repeats its input after a greeting."""
    greeting = config.get("greeting", "").encode()
    return lambda payload: greeting + payload


def obey(config: dict[str, Any]) -> Job:
    """Return a job that does what its input says: an action of ACTIONS and an argument."""

    def job(payload: bytes) -> bytes:
        action, _, argument = payload.decode().partition(" ")
        return ACTIONS[action](argument)

    return job


def _spin(_: str) -> bytes:
    while True:
        pass


def _report_and_spin(path: str) -> bytes:
    """Write to the named pipe, so that its reader knows that the job runs, and never return."""
    Path(path).write_text("running")
    return _spin("")


def _wait(path: str) -> bytes:
    """Wait until the named pipe is written to; return what was written."""
    return Path(path).read_bytes()


def _die(_: str) -> bytes:
    os.kill(os.getpid(), signal.SIGSEGV)
    return b""


def _fail(message: str) -> bytes:
    raise ValueError(message)


def _print(_: str) -> bytes:
    sys.stdout.write("noise")
    sys.stdout.flush()
    os.write(1, b"more noise")
    return _pid("")


def _pid(_: str) -> bytes:
    return str(os.getpid()).encode()


ACTIONS: dict[str, Callable[[str], bytes]] = {
    "spin": _spin,
    "report": _report_and_spin,
    "wait": _wait,
    "eat": lambda size: bytes(int(size)),
    "die": _die,
    "fail": _fail,
    "print": _print,
    "pid": _pid,
    "environment": lambda _: "\n".join(sorted(os.environ)).encode(),
    "niceness": lambda _: str(os.nice(0)).encode(),
}


def broken(config: dict[str, Any]) -> Job:
    """Raise an error about the config."""
    raise ValueError("this config\nis nonsense")


def needs_file(config: dict[str, Any]) -> Job:
    """Return the job of `obey` while a file exists; raise an error when it does not."""
    if not Path(config["file"]).exists():
        raise ValueError("the file is gone")
    return obey(config)


def hungry(config: dict[str, Any]) -> Job:
    """Need a gigabyte before there is a job."""
    bytearray(1 << 30)
    return echo(config)
