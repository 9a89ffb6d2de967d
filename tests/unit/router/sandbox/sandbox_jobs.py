"""Jobs for the tests of the sandbox. The workers import them by name."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = Callable[[bytes], bytes]
PIPES: list[int] = []
"""The named pipe of the config, open for reading and writing: a confined job cannot open it."""


def echo(config: dict[str, Any]) -> Callable[[], Job]:
    """Make a job that repeats its input after a greeting."""
    greeting = config.get("greeting", "").encode()
    return lambda: lambda payload: greeting + payload


def obey(config: dict[str, Any]) -> Callable[[], Job]:
    """Make a job that does what its input says: an action of ACTIONS and an argument."""
    if pipe := config.get("pipe"):
        PIPES.append(os.open(pipe, os.O_RDWR))

    def job(payload: bytes) -> bytes:
        action, _, argument = payload.decode().partition(" ")
        return ACTIONS[action](argument)

    return lambda: job


def _spin(_: str) -> bytes:
    while True:
        pass


def _report_and_spin(_: str) -> bytes:
    """Write to the named pipe, so that its reader knows that the job runs, and never return."""
    os.write(PIPES[0], b"running")
    return _spin("")


def _wait(_: str) -> bytes:
    """Wait until the named pipe is written to; return what was written."""
    return os.read(PIPES[0], 1000)


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


def _execute(code: str) -> bytes:
    """Run Python code; return the name of its error, or what it left in `result`."""
    names: dict[str, Any] = {"os": os, "ctypes": ctypes, "socket": socket, "libc": ctypes.CDLL(None, use_errno=True)}
    try:
        exec(code, names)
    except OSError as error:
        return type(error).__name__.encode()
    return str(names.get("result")).encode()


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
    "execute": _execute,
}


def without_filter(config: dict[str, Any]) -> Callable[[], Job]:
    """Make the job of `obey` on a machine for which there is no filter of system calls."""
    platform.machine = lambda: "unknown"
    return obey(config)


def broken(config: dict[str, Any]) -> Callable[[], Job]:
    """Raise an error about the config."""
    raise ValueError("this config\nis nonsense")


def needs_file(config: dict[str, Any]) -> Callable[[], Job]:
    """Make the job of `obey` while a file exists; raise an error when it does not."""
    if not Path(config["file"]).exists():
        raise ValueError("the file is gone")
    return obey(config)


def hungry(config: dict[str, Any]) -> Callable[[], Job]:
    """Need a gigabyte before there is a job."""

    def make() -> Job:
        bytearray(1 << 30)
        return echo(config)()

    return make


def dies(config: dict[str, Any]) -> Callable[[], Job]:
    """Die, unless the file of the config is gone; remove it first if the config says so."""
    file = Path(config["file"])
    if file.exists():
        if config["once"]:
            file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return obey(config)
