"""The lifeline: a pipe through which a child process notices that its parent died.

The launcher holds the only write end; each child inherits the read end. End of file means that the launcher ended, for
any reason. The child then stops as after SIGTERM and has LIFELINE_GRACE seconds for it.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from text_generation_common.exit_codes import ExitCode

LIFELINE_GRACE = 1.5
"""Seconds a process has for a graceful stop after its parent died."""


@contextmanager
def open_lifeline() -> Iterator[int]:
    """Yield the read end of a new lifeline; this process keeps the write end."""
    read_fd, write_fd = os.pipe()  # inherited only by children that get the read end in pass_fds
    try:
        yield read_fd
    finally:
        os.close(read_fd)
        os.close(write_fd)


def follow_parent(lifeline_fd: int, cleanup: Callable[[], object] | None = None) -> None:
    """Stop when the parent dies: SIGTERM to this process, and SIGKILL to its process group LIFELINE_GRACE seconds later.

    Call it first in `main`, from the main thread, before slow imports. A negative descriptor means no lifeline: no-op.
    `cleanup` runs just before that SIGKILL, and at a SIGTERM that arrives before the event loop has its own handler. It
    must not use the event loop, which may be blocked at that point.
    """
    if lifeline_fd < 0:
        return

    def stop_while_starting(_signal: int, _frame: FrameType | None) -> None:
        if cleanup is not None:
            cleanup()
        os._exit(ExitCode.STOPPED)  # an exception could be swallowed by the module that is being imported

    signal.signal(signal.SIGTERM, stop_while_starting)
    _wake_when_parent_dies()
    threading.Thread(target=_follow, args=(lifeline_fd, cleanup), name="lifeline", daemon=True).start()


def _follow(lifeline_fd: int, cleanup: Callable[[], object] | None) -> None:
    select.select([lifeline_fd], [], [])  # the parent never writes: readable means end of file
    # The parent also read our output: without this, each log record would raise BrokenPipeError.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LIFELINE_GRACE)
    try:
        if cleanup is not None:
            cleanup()
    finally:
        if os.getpgrp() == os.getpid():  # our own group, as the launcher starts us: includes an engine's workers
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _wake_when_parent_dies() -> None:
    """Ask the kernel for SIGCONT when the parent dies (Linux only).

    A stopped process (debugger, SIGSTOP) could not see the end of its lifeline. Not SIGTERM, which would arrive before the
    output is redirected; not SIGKILL, which leaves no time for a graceful stop.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGCONT))
