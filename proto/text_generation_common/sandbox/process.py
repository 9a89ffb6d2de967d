"""Starts the child process of a sandbox."""

import os
import socket
import subprocess
import sys

ENV_NAMES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "TZDIR", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME")  # fmt: skip
"""The environment variables that a worker gets: no tokens and no keys."""


def start_process(factory: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a worker on this thread, and return it and the socket to it. It dies with the thread that started it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            # -P: imports must not look into the folder that this program runs in.
            [sys.executable, "-P", "-m", "text_generation_common.sandbox.worker", factory],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ENV_NAMES if name in os.environ},
        )
        return process, ours.dup()
