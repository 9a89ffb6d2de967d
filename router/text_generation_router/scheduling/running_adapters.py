"""RunningAdapters: the LoRA adapters of one replica's sequences, of which its device holds a limited number at a time.

A sequence waits while its adapter has no place and none is free. If a sequence waits, the adapter that has had its place for the
longest takes no new sequences until its last one has ended, and gives the place to whom is first in the queue. Only one place is
emptied for each adapter that waits, so the others go on, and each adapter gets its turn.
"""

from collections import Counter

from text_generation_router.scheduling.messages import ReplicaSpec


class RunningAdapters:
    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        """Sequences by adapter, the one that has had its place for the longest first."""
        self._closed: dict[str, str] = {}
        """Adapters that take no new sequences → the adapter that waits for the place."""

    def take(self, adapter: str, spec: ReplicaSpec) -> bool:
        """Return True if a sequence with this adapter may start now."""
        if not adapter or not spec.max_loras:
            return spec.holds(adapter)
        free = len(self._running) < spec.max_loras
        return spec.holds(adapter) and (adapter not in self._closed if adapter in self._running else free)

    def has_part_in(self, adapter: str) -> bool:
        """Return True if this adapter has a place, or one becomes free for it."""
        return adapter in self._running or adapter in self._closed.values()

    def empty_place(self, adapter: str) -> None:
        """Let a place become free for this adapter, of which a sequence waits; no-op if others wait for all of them."""
        oldest = next((each for each in self._running if each not in self._closed), None)
        if oldest is not None:
            self._closed[oldest] = adapter

    def started(self, adapter: str) -> None:
        if adapter:
            if not self._running[adapter]:
                self.waits_no_more(adapter)
            self._running[adapter] += 1

    def waits_no_more(self, adapter: str) -> None:
        """Note that no place has to become free for this adapter."""
        self._closed = {each: waiter for each, waiter in self._closed.items() if waiter != adapter}

    def ended(self, adapter: str) -> None:
        if adapter:
            self._running[adapter] -= 1
            if not self._running[adapter]:
                del self._running[adapter]
                self._closed.pop(adapter, None)
