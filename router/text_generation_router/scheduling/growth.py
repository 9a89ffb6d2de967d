"""Who wants KV blocks to grow into, who gets some, and who has to go when there are none left."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from text_generation_router.request import Priority, RequestId
from text_generation_router.scheduling.blocks import BlockCache
from text_generation_router.scheduling.entry import Entry, State

LOW_ROOM = 24
"""Tokens of room below which an entry wants blocks."""
URGENT_ROOM = 8
"""Tokens of room below which it should not wait any longer."""


class Growth:
    """The running entries of one replica whose room gets short."""

    def __init__(self, cache: BlockCache, growth_tokens: int) -> None:
        self._cache = cache
        self._growth_tokens = growth_tokens
        self._hungry: dict[RequestId, Entry] = {}
        self.urgent = False
        """Whether somebody should not wait any longer."""

    def look_at(self, entry: Entry) -> None:
        """The room of `entry` has become less."""
        room = entry.capacity - entry.length
        if room < LOW_ROOM and entry.capacity < entry.longest:
            self._hungry[entry.request.id] = entry
            self.urgent = self.urgent or room < URGENT_ROOM

    def forget(self, entry: Entry) -> None:
        """`entry` runs no more."""
        self._hungry.pop(entry.request.id, None)

    def grant(self, running: int, on_stalled: Callable[[], None]) -> list[tuple[int, tuple[int, ...]]]:
        """If it is urgent, grant blocks to all who want some, oldest first, beside `running` running entries: (slot,
        blocks). `on_stalled` is called for each that cannot go on and gets none; it may end others."""
        if not self.urgent:
            return []
        grants: list[tuple[int, tuple[int, ...]]] = []
        for entry in sorted(self._hungry.values(), key=lambda entry: entry.arrival):
            if entry.state is not State.RUNNING:
                continue
            if blocks := self._cache.grow(entry, self._affordable(entry, running)):
                grants.append((entry.slot, tuple(blocks)))
                del self._hungry[entry.request.id]
            elif entry.length > entry.capacity:
                on_stalled()
        self.urgent = any(entry.capacity - entry.length < URGENT_ROOM for entry in self._hungry.values())
        return grants

    def _affordable(self, entry: Entry, running: int) -> int:
        """Blocks to grant now: all that are wanted while the pool is rich, just the next one while it is not."""
        pool, available = self._cache.pool, self._cache.available
        most = pool.blocks_for(min(entry.length + self._growth_tokens, entry.longest)) - len(entry.blocks)
        return most if available >= most + running else min(1, most, available)


def to_preempt(running: Iterable[Entry], *, self_scheduling: bool) -> Entry | None:
    """Of the lowest class the newest, but for the oldest of all, unless it is alone.

    At an engine that schedules for itself nobody who follows a grammar, for it might be bound (`Entry.is_bound`) by the time
    it is released; None if that leaves nobody. Such an engine makes room by itself.
    """
    oldest, *others = sorted(running, key=lambda entry: entry.arrival)
    candidates = others or [oldest]
    if self_scheduling:
        candidates = [entry for entry in candidates if entry.request.grammar is None]
    return max(candidates, key=_dispensability, default=None)


def _dispensability(entry: Entry) -> tuple[Priority, int]:
    return entry.request.qos.priority, entry.arrival
