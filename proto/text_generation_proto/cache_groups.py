"""CacheGroup: the KV blocks of layers that need the same positions, and the rule that says which."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A group of the cache of a replica: its blocks, and its rule. Router and shard derive all else from these.

    The first group of a cache is full, and has a block for each block of positions; it may have no layers. The kinds:

    full          a token needs all positions before it
    window        a token needs the last `window` positions, its own included: older blocks are given back
    """

    num_blocks: int
    window: int | None = None
    """None: full."""

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that the tokens from `position` on need."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def blocks_held(self, tokens: int, block_size: int) -> int:
        """Return the most blocks that the next of at most `tokens` tokens needs, its own included."""
        blocks = -(-tokens // block_size)
        return blocks if self.window is None else min(blocks, (self.window + block_size - 2) // block_size + 1)

    @property
    def name(self) -> str:
        """The name in metrics and reports: "full", "window 1024"."""
        return "full" if self.window is None else f"window {self.window}"
