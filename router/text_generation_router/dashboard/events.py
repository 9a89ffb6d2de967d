"""EventLog: the last events of replicas, requests and processes, for the dashboard.

Events are found by comparing the state of the server with that of a second before, so that they cost nothing in between. A
replica that is lost and back within the second has both events, because sessions and losses are counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

from text_generation_router.scheduling.scheduler import SchedulerStats
from text_generation_router.shards.member import ShardMember, ShardState

MAX_EVENTS = 200
"""Events that are remembered."""
MAX_REASON = 300
"""Characters of a reason that are remembered."""
SUM_S = {"moved": 5.0, "preempted": 60.0}
"""Kinds of events of requests; seconds after which the next one is another event: a full KV cache preempts every second."""

_TEXTS = {
    ShardState.SERVING: ("back", "Replica {} gets requests again"),
    ShardState.HUNG: ("hung", "Replica {} hangs"),
    ShardState.DRAINING: ("draining", "Replica {} drains"),
    ShardState.TAKEN: ("taken", "Replica {} is driven by another router"),
    ShardState.REFUSED: ("refused", "Replica {} cannot join"),
}
"""Kind and text of the event that a member got into a state. One that joins was lost before."""


@dataclass(slots=True)
class Event:
    """An event; of requests, as many as it counts."""

    id: int
    began: float
    """Seconds of the monotonic clock."""
    at: float
    """The same, or the time of the last one that it counts."""
    kind: str
    text: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """A member as it was seen last."""

    state: ShardState
    sessions: int
    losses: int


class EventLog:
    """The last events."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._ids = count(time.monotonic_ns() // 1000)  # a page may know events of a process before
        self._seen: dict[int, _Seen] | None = None
        """By number of the member; None before the first look."""
        self._sums: dict[str, Event] = {}
        """The last event of requests, by kind."""
        self._counted = dict.fromkeys(SUM_S, 0)

    def add(self, kind: str, text: str, reason: str = "") -> Event:
        """Remember an event of now."""
        now = time.monotonic()
        self._events.append(event := Event(next(self._ids), now, now, kind, text, reason[:MAX_REASON], 0))
        return event

    def after(self, at: float, *, reasons: bool) -> list[dict[str, Any]]:
        """Return the events after `at`, with their reasons or without: these may name addresses."""
        shown = ("id", "began", "kind", "text", "count", *(("reason",) if reasons else ()))
        return [{name: getattr(each, name) for name in shown} for each in self._events if each.at > at]

    def observe(self, members: Iterable[ShardMember], stats: SchedulerStats) -> None:
        """Remember the events since the last call."""
        before, self._seen = self._seen, {}
        for member in members:
            seen = self._seen[member.number] = _Seen(member.state, member.session.sessions, member.losses)
            if before is not None:
                self._compare(member, seen, before.get(member.number, _Seen(ShardState.JOINING, 0, 0)))
        for number in (before or {}).keys() - self._seen.keys():
            self.add("left", f"Replica {number} left")
        for kind, total, text in (
            ("moved", stats.moves, "Requests moved from a lost replica"),
            ("preempted", stats.preemptions, "Requests preempted, the KV cache is full"),
        ):
            if (new := total - self._counted[kind]) > 0:
                self._sum(kind, text, new)
            self._counted[kind] = total

    def _compare(self, member: ShardMember, seen: _Seen, before: _Seen) -> None:
        number = member.number
        if seen.losses > before.losses:
            kind = "stopped" if member.session.stopped else "lost"
            self.add(kind, f"Replica {number} {kind}", member.loss)
        if seen.sessions > before.sessions:
            self.add("back", f"Replica {number} serves" + (" again" if before.sessions else ""))
        elif seen.state is not before.state and seen.state in _TEXTS:
            kind, text = _TEXTS[seen.state]
            self.add(kind, text.format(number), member.reason)

    def _sum(self, kind: str, text: str, new: int) -> None:
        now, last = time.monotonic(), self._sums.get(kind)
        if last is None or now - last.at > SUM_S[kind]:
            last = self._sums[kind] = self.add(kind, text)
        last.at, last.count = now, last.count + new
