"""LazyHeap: the least of items whose keys change, and that leave from the middle. O(log n) amortised.

A key may rise without a word: it is looked at again when its item comes to the top. One that falls must be said (`put`).
What is stale stays in the heap until it comes to the top, or until it is more than half of the heap.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

T = TypeVar("T")

Key = tuple[float, int]
"""What items are ordered by; no two items in a heap have the same."""


_Push = tuple[Key, int, T]
"""Key, number of the push, item. The number keeps items from being compared: what is stale here may have another's key."""


class LazyHeap(Generic[T]):
    """Items by `key`, which is asked again whenever it matters."""

    __slots__ = ("_heap", "_key", "_live", "_pushes")

    def __init__(self, key: Callable[[T], Key]) -> None:
        self._key = key
        self._heap: list[_Push[T]] = []
        self._live: dict[T, _Push[T]] = {}
        """Of each item, the one push that counts; its key is never above the true one."""
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def put(self, item: T) -> None:
        """Add `item`, or hear that its key may have fallen."""
        key = self._key(item)
        live = self._live.get(item)
        if live is not None and live[0] <= key:
            return
        self._pushes += 1
        push = self._live[item] = (key, self._pushes, item)
        heappush(self._heap, push)
        self._compact()

    def discard(self, item: T) -> None:
        """Take `item` out, wherever it stands, if it is here."""
        if self._live.pop(item, None) is not None:
            self._compact()

    def first(self) -> T | None:
        """The item with the least key; None if there is none."""
        heap = self._heap
        while heap:
            push = heap[0]
            pushed, number, item = push
            if self._live.get(item) is not push:
                heappop(heap)
                continue
            key = self._key(item)
            if key == pushed:
                return item
            fresh = self._live[item] = (key, number, item)
            heapreplace(heap, fresh)
        return None

    @property
    def stored(self) -> int:
        """Keys in memory, the stale ones included: at most twice as many as items."""
        return len(self._heap)

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._live):
            self._heap = list(self._live.values())
            heapify(self._heap)
