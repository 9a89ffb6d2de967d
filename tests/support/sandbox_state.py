"""The state of a sandbox that tests look at."""

from text_generation_router.admission_queue import WorkerQueue
from text_generation_router.sandbox.pool import Sandbox


def pids(sandbox: Sandbox) -> frozenset[int]:
    """Return the process ids of the ready workers."""
    return frozenset(worker.process.pid for worker in sandbox._ready)


def waiting_calls(sandbox: Sandbox) -> int:
    """Return the number of calls that wait for a worker."""
    return waiting_claims(sandbox._turns) + len(sandbox._waiting)


def waiting_claims(queue: WorkerQueue) -> int:
    """Return the number of claims that wait."""
    return sum(map(len, queue._lines.values()))
