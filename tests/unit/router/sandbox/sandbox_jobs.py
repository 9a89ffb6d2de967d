"""Jobs for the tests of the sandbox; the workers import them by name."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = Callable[[bytes], bytes]


def echo(config: dict[str, Any]) -> Job:
    """Says back what it is told, behind a greeting."""
    greeting = config.get("greeting", "").encode()
    return lambda payload: greeting + payload


def obey(config: dict[str, Any]) -> Job:
    """Does what the payload says, good or bad."""

    def job(payload: bytes) -> bytes:
        deed, _, argument = payload.decode().partition(" ")
        return DEEDS[deed](argument)

    return job


def _spin(_: str) -> bytes:
    while True:
        pass


def _tell(path: str) -> bytes:
    """Whoever reads the named pipe knows that the job runs."""
    Path(path).write_text("running")
    return _spin("")


def _wait(path: str) -> bytes:
    """Until somebody writes to the named pipe."""
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


DEEDS: dict[str, Callable[[str], bytes]] = {
    "spin": _spin,
    "tell": _tell,
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
    """A factory that refuses its config."""
    raise ValueError("this config\nis nonsense")


def starts_once(config: dict[str, Any]) -> Job:
    """A factory that works only as long as a file is there."""
    if not Path(config["file"]).exists():
        raise ValueError("the file is gone")
    return obey(config)


def hungry(config: dict[str, Any]) -> Job:
    """A factory that needs a gigabyte."""
    bytearray(1 << 30)
    return echo(config)
