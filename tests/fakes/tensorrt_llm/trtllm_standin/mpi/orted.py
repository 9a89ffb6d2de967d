"""Starts the worker processes, as Open MPI's daemon does. Prints "ready", then the rank of each process that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main() -> None:
    """Run as many as the first argument says until all have ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a session of its own
    command = [sys.executable, "-S", "-m", "mpi4py.futures.server"]
    processes = [subprocess.Popen(command) for _ in range(int(sys.argv[1]))]
    ranks = {process.pid: rank for rank, process in enumerate(processes)}
    print("ready", flush=True)  # the library waits for all ranks
    while ranks:
        pid, _ = os.wait()
        print(ranks.pop(pid), flush=True)


if __name__ == "__main__":
    main()
