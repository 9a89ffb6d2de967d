"""Entry: one request's place in the scheduler. Private to the core; outside there is a RequestId."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from text_generation_router.request import Request, TokenId


class State(Enum):
    """Where an entry stands.

    WAITING ──► RUNNING ──► (finished, failed: gone)
       ▲           │
       └─ PREEMPTED ┘   its release is under way; late tokens still count, then it waits again
    CANCELLED           its release is under way; late tokens count for nothing, then it is gone
    """

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    CANCELLED = auto()


@dataclass(slots=True, eq=False)
class Entry:
    """A request, what it generated, and what it holds on the replica."""

    request: Request
    arrival: int
    """Order of arrival; the newest entry is the first to be preempted."""
    state: State = State.WAITING
    generated: list[TokenId] = field(default_factory=list)
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    prefill_length: int = 0
    """Tokens to prefill under this admission: the prompt, and what was generated before a preemption."""
    ordered: int = 0
    """Of those, how many were ordered so far."""
    released_by: int = 0
    """Number of the orders that release the slot; 0 until those are made."""
    length: int = field(init=False)
    """Tokens known: prompt and generated."""
    longest: int = field(init=False)
    """Positions whose KV may ever be needed: the last new token's is not."""
    capacity: int = 0
    """Positions its blocks hold."""

    def __post_init__(self) -> None:
        self.length = len(self.request.prompt)
        self.longest = self.length + self.request.max_new_tokens - 1
