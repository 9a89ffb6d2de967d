"""The prompts that one replica has still to compute: what was ordered of them, and what was reported."""

from __future__ import annotations

from collections.abc import Iterator

from text_generation_router.request import RequestId
from text_generation_router.scheduling.chunks import share_budget
from text_generation_router.scheduling.entry import Entry, State
from text_generation_router.scheduling.prefix import Beginnings, shared_tokens


class Prompts:
    """Placed and running entries whose prompt is not wholly computed yet, in the order in which they came."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._computing: dict[RequestId, Entry] = {}
        self._beginnings = Beginnings()
        self._to_order: dict[RequestId, Entry] = {}
        """Those whose prompt is not wholly ordered yet."""
        self.unordered = 0
        """Prompt tokens still to be ordered."""
        self.uncomputed = 0
        """Prompt tokens still to be computed."""

    def __len__(self) -> int:
        """Entries whose prompt is not wholly computed."""
        return len(self._computing)

    def __contains__(self, entry: Entry) -> bool:
        return entry.request.id in self._computing

    @property
    def running(self) -> int:
        """Those that run already."""
        return sum(1 for entry in self._computing.values() if entry.state is State.RUNNING)

    @property
    def first_to_order(self) -> Entry | None:
        """The oldest whose prompt is not wholly ordered."""
        return next(iter(self._to_order.values()), None)

    def add(self, entry: Entry) -> None:
        """`entry` is placed."""
        self._computing[entry.request.id] = entry
        self._to_order[entry.request.id] = entry
        self._beginnings.add(entry)
        self.unordered += entry.unordered
        self.uncomputed += entry.prefill_length - entry.prefilled

    def remove(self, entry: Entry) -> bool:
        """`entry` goes no further; whether it was among these."""
        if self._computing.pop(entry.request.id, None) is None:
            return False
        self._to_order.pop(entry.request.id, None)
        self._beginnings.remove(entry)
        self.unordered -= entry.unordered
        self.uncomputed -= entry.prefill_length - entry.prefilled
        return True

    def order(self, budget: int) -> Iterator[tuple[Entry, int]]:
        """Order chunks of so many tokens in all: (entry, tokens)."""
        for entry, chunk in share_budget(list(self._to_order.values()), budget):
            entry.ordered += chunk
            self.unordered -= chunk
            if entry.unordered == 0:
                del self._to_order[entry.request.id]
            yield entry, chunk

    def computed(self, entry: Entry, chunk: int) -> bool:
        """`chunk` more tokens of `entry`, which is among these, were computed; whether that was its whole prompt."""
        entry.prefilled += chunk
        self.uncomputed -= chunk
        if entry.prefilled < entry.prefill_length:
            return False
        del self._computing[entry.request.id]
        self._beginnings.remove(entry)
        return True

    def shared_with(self, entry: Entry) -> tuple[int, Entry | None]:
        """Leading tokens of `entry` that one of these has, too, and which. A few tokens count as none."""
        if not self._computing:
            return 0, None
        longest, leader = 0, None
        for other in self._beginnings.alike(entry):
            shared = shared_tokens(entry.prompt_key, other.prompt_key, self._block_size)
            if shared > longest:
                longest, leader = shared, other
        return min(longest, (entry.length - 1) // self._block_size * self._block_size), leader
