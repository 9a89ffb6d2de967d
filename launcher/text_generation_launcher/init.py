"""The first process of a container: it forwards signals and reaps every process that others left behind.

The kernel gives orphans to the first process of their PID namespace, and keeps those that ended until it has waited for
them. It also drops signals that this process has no handler for.
"""

import os
import signal

from text_generation_common.secrets import erase_secrets

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def fork_from_init() -> None:
    """Return in a child process. This process ends with the child, with its exit code or 128 + the number of its signal."""
    waited = {*_FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)  # a terminal then sends Ctrl-C to the first process only, which forwards it once
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    erase_secrets()
    while (code := _reap(child)) is None:
        if (received := signal.sigwait(waited)) != signal.SIGCHLD:
            os.kill(child, received)  # never another process: its pid is free only after it was waited for
    os._exit(code)


def _reap(child: int) -> int | None:
    """Wait for all processes that have ended; return the child's exit code if it is one of them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
