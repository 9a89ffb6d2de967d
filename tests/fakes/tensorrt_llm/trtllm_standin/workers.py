"""Worker processes, one per rank. They do nothing; a test can kill one.

As with MPI_Comm_spawn under Open MPI, a helper process of the caller starts them, with the command line `python -m
mpi4py.futures.server`. They end with the caller: they read a pipe that only the caller holds open.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "mpi"


class Workers:
    """The processes of `count` ranks."""

    def __init__(self, count: int, lost: Callable[[int], None]) -> None:
        """Start them. A thread calls `lost` with a rank when its process ends. Raises RuntimeError."""
        self._is_stopping = False
        self._helper = subprocess.Popen(
            [sys.executable, "-S", str(FOLDER / "orted.py"), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(FOLDER)},
            text=True,
        )
        assert self._helper.stdout is not None
        if not self._helper.stdout.readline():
            self.stop()
            raise RuntimeError("Executor worker died during initialization")
        threading.Thread(target=self._listen, args=(lost,), name="trtllm-standin-mpi", daemon=True).start()

    def stop(self) -> None:
        """End them and wait for them."""
        self._is_stopping = True
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        self._helper.wait()

    def _listen(self, lost: Callable[[int], None]) -> None:
        assert self._helper.stdout is not None
        with self._helper.stdout as lines:
            for line in lines:
                if not self._is_stopping:
                    lost(int(line))
