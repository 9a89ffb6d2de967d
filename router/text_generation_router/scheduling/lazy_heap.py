"""LazyHeap: a priority queue whose keys may change and from which any item can be removed. O(log n) amortised.

Keys may increase silently: a key is read again when its item reaches the top. Call `put` after a decrease. Stale entries
stay in the heap until they reach the top, or until they are more than half of it and more than SLACK.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

T = TypeVar("T")

SLACK = 3
"""Stale entries that a heap may hold however small it is: a small heap is not rebuilt with every change."""

Key = tuple[float, int]
"""Orders items; keys of items in one heap are distinct."""


_Push = tuple[Key, int, T]
"""(key, push number, item). The number avoids comparing items: a stale entry may have the same key as another one."""


class LazyHeap(Generic[T]):
    """Items ordered by `key(item)`, smallest first."""

    __slots__ = ("_heap", "_key", "_live", "_pushes")

    def __init__(self, key: Callable[[T], Key]) -> None:
        self._key = key
        self._heap: list[_Push[T]] = []
        # The valid entry of each item. Its key is never above the true one.
        self._live: dict[T, _Push[T]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def put(self, item: T) -> None:
        """Add `item`, or update it after its key decreased."""
        key = self._key(item)
        live = self._live.get(item)
        if live is not None and live[0] <= key:
            return
        self._pushes += 1
        push = self._live[item] = (key, self._pushes, item)
        heappush(self._heap, push)
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._compact()

    def discard(self, item: T) -> None:
        """Remove `item`; no-op if it is not here."""
        if self._live.pop(item, None) is not None and len(self._heap) > 2 * len(self._live) + SLACK:
            self._compact()

    def first(self) -> T | None:
        """Return the item with the smallest key, or None."""
        heap = self._heap
        while heap:
            push = heap[0]
            pushed_key, number, item = push
            if self._live.get(item) is not push:
                heappop(heap)
                continue
            key = self._key(item)
            if key == pushed_key:
                return item
            fresh = self._live[item] = (key, number, item)
            heapreplace(heap, fresh)
        return None

    def _compact(self) -> None:
        self._heap = list(self._live.values())
        heapify(self._heap)
