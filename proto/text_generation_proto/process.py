"""What a process of ours owes the one that started it: settings, exit codes, a lifeline.

Launcher and child speak through argv, the environment, signals, exit codes and one inherited pipe. That is a protocol as
shard.proto is one, so it lives beside it.

The lifeline: the launcher holds the only write end of a pipe; each child inherits the read end. End of file means that
the launcher is gone, however it died, and the child stops in order.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from enum import IntEnum
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ExitCode(IntEnum):
    """How a process of ours ended."""

    STOPPED = 0
    """Asked to stop, and did."""
    FAILED = 1
    """Could not start or go on; the last log line says why."""
    USAGE = 2
    """The settings make no sense."""
    BUG = 70
    """A broken invariant; the log has a traceback."""
    DEPENDENCY_LOST = 75
    """A process this one needs went away."""


class ProcessConfig(BaseSettings):
    """Settings every process has. Precedence: command line, environment (the flag in upper snake case), default."""

    model_config = SettingsConfigDict(
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        frozen=True,
        extra="forbid",
    )

    json_output: bool = False
    """Log one JSON object a line."""
    log_level: Annotated[str, Field(pattern="^(?i:debug|info|warning|error)$")] = "info"
    """debug, info, warning or error."""
    lifeline_fd: int = -1
    """Inherited pipe whose end of file says that the parent died; set by the launcher."""


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send `sig` to this process when the thread that started it ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(sig))


async def parent_gone(lifeline_fd: int) -> None:
    """Return when the parent at the other end of the lifeline has died; without a lifeline, wait for ever."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    if lifeline_fd >= 0:
        os.set_blocking(lifeline_fd, False)
        loop.add_reader(lifeline_fd, gone.set)
    try:
        await gone.wait()
    finally:
        if lifeline_fd >= 0:
            loop.remove_reader(lifeline_fd)
