"""Worker processes without MPI: one process stands for all ranks."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "zmq", "trtllm_real.finder"])


class MpiSession:
    """The interface of sessions."""


class MpiPoolSession(MpiSession):
    """Runs a task in one new process: the first rank, and no other one."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers
        self._process: BaseProcess | None = None

    def submit(self, task: Callable[..., Any], *args: object, **kwargs: object) -> list[Future[Any]]:
        """Start the task; the future ends with the process at the latest."""
        future: Future[Any] = Future()
        ours, theirs = CONTEXT.Pipe(duplex=False)
        work = (dict(os.environ), list(sys.path), task, args, kwargs, theirs)
        self._process = CONTEXT.Process(target=_enter, args=(work[:2], _Late(work[2:])), daemon=True)
        self._process.start()
        theirs.close()
        threading.Thread(target=_wait, args=(ours, future), name="worker process", daemon=True).start()
        return [future]

    def shutdown(self) -> None:
        """Wait for the process."""
        if self._process is not None:
            self._process.join()

    def shutdown_abort(self, reason: object = None) -> None:
        """Kill the process."""
        del reason
        if self._process is not None:
            self._process.kill()


class _Late:
    """Arguments that are unpickled after the environment and the search path are set."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return _Late._restore, (multiprocessing.reduction.ForkingPickler.dumps(self._arguments).tobytes(),)

    @staticmethod
    def _restore(data: bytes) -> Callable[[], Any]:
        return lambda: multiprocessing.reduction.ForkingPickler.loads(data)


def _enter(surroundings: tuple[dict[str, str], list[str]], late: Callable[[], Any]) -> None:
    os.environ.clear()
    os.environ.update(surroundings[0])
    sys.path[:] = surroundings[1]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    task, args, kwargs, connection = late()
    try:
        outcome = (task(*args, **kwargs), None)
    except Exception as error:  # noqa: BLE001 - it belongs to the future
        outcome = (None, error)
    connection.send(outcome)


def _end_with(parent: int) -> None:
    """End this process soon after its parent, the fork server, which ends with the caller."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _wait(connection: Connection, future: Future[Any]) -> None:
    try:
        result, error = connection.recv()
    except EOFError:
        result, error = None, RuntimeError("the worker process died")
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
