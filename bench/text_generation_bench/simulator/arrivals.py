"""Arrival: one request of a trace, and what its client does after. Traces are iterators of these, in order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from text_generation_router.request import Priority, TenantId

NOBODY = TenantId("")


@dataclass(slots=True)
class Arrival:
    """A request that a client will send at `at`."""

    at: float
    """Seconds since the simulation began."""
    prompt: tuple[int, ...]
    new_tokens: int
    """Tokens after which the model ends: the truth, which the scheduler does not know."""
    max_new_tokens: int
    answer_at: int
    """Where in the pool's ids the answer begins."""
    tenant: TenantId = NOBODY
    priority: Priority = Priority.DEFAULT
    queue_s: float | None = None
    """Seconds it may be in the queue."""
    total_s: float | None = None
    """Seconds until its answer must be whole."""
    leaves_after_s: float | None = None
    """Seconds after which the client is gone."""
    kind: str = ""
    """A word by which figures are kept apart: the long prompts among short ones."""
    follow_up: Callable[[float], Arrival | None] | None = None
    """Given when the answer was whole: what the client sends next, if anything."""


Trace = Iterator[Arrival]
