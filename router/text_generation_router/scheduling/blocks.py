"""BlockPool: which KV blocks are free. Each block has one owner or none."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """The KV blocks of one replica."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Last in, first out: a block freed a moment ago is the likeliest to be in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> tuple[int, ...]:
        """`count` free blocks. The caller has looked at `free`."""
        assert 0 <= count <= len(self._free), "more blocks taken than are free"
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, blocks: Iterable[int]) -> None:
        """These blocks have no owner any more."""
        self._free.extend(blocks)
        assert len(self._free) <= self.num_blocks, "a block was given back twice"
