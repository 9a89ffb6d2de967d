"""EventLog: the last events of replicas, requests and processes, for the dashboard.

Events are found by comparing the state of the server with that of a second before, so that they cost nothing in between. A
replica that is lost and back within the second has both events, because sessions and losses are counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any

from text_generation_router.scheduling.scheduler import SchedulerStats
from text_generation_router.shards.member import ShardMember, ShardState
from text_generation_router.shards.replica import ShardStopped

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

Event = dict[str, Any]


class EventLog:
    """The last events."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._ids = count(time.monotonic_ns() // 1000)  # a page may know events of a process before
        self._seen: dict[int, tuple[ShardState, int, int]] | None = None
        """State, sessions and losses by number of the member; None before the first look."""
        self._sums: dict[str, Event] = {}
        """The last event of requests, by kind."""
        self._counted = dict.fromkeys(SUM_S, 0)

    def add(self, kind: str, text: str, reason: str = "") -> Event:
        """Remember an event of now."""
        now, event_id = time.monotonic(), next(self._ids)
        event = {"id": event_id, "began": now, "at": now, "kind": kind, "text": text, "reason": reason[:MAX_REASON]}
        self._events.append(event)
        return event

    def after(self, at: float, *, reasons: bool) -> list[Event]:
        """Return the events after `at`, with their reasons or without: these may name addresses."""
        shown = [event for event in self._events if event["at"] > at]
        return shown if reasons else [event | {"reason": ""} for event in shown]

    def observe(self, members: Iterable[ShardMember], stats: SchedulerStats) -> None:
        """Remember the events since the last call."""
        before, self._seen = self._seen, {}
        for member in members:
            self._seen[member.number] = member.state, member.connection.sessions, member.losses
            if before is not None:
                self._compare(member, *before.get(member.number, (ShardState.JOINING, 0, 0)))
        for number in (before or {}).keys() - self._seen.keys():
            self.add("left", f"Replica {number} left")
        self._sum("moved", "Requests moved after a loss", stats.moves)
        self._sum("preempted", "Requests preempted, the KV cache is full", stats.preemptions)

    def _compare(self, member: ShardMember, state: ShardState, sessions: int, losses: int) -> None:
        number = member.number
        if member.losses > losses:
            kind = "stopped" if isinstance(member.loss, ShardStopped) else "lost"
            self.add(kind, f"Replica {number} {kind}", str(member.loss))
        if member.connection.sessions > sessions:
            self.add("back", f"Replica {number} serves" + " again" * bool(sessions))
        elif member.state is not state and member.state in _TEXTS:
            kind, text = _TEXTS[member.state]
            self.add(kind, text.format(number), member.reason)

    def _sum(self, kind: str, text: str, total: int) -> None:
        new, self._counted[kind] = total - self._counted[kind], total
        if new <= 0:
            return
        now, last = time.monotonic(), self._sums.get(kind)
        if last is None or now - last["at"] > SUM_S[kind]:
            last = self._sums[kind] = self.add(kind, text)
        last |= {"at": now, "count": last.get("count", 0) + new}
