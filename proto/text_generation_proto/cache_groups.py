"""CacheGroup: the blocks of layers that need the same positions or states, and the rule that says which."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A group of the cache of a replica: its blocks, and its rule. Router and shard derive all else from these.

    The first group of a cache is full, and has a block for each block of positions; it may have no layers. The kinds:

    full          a token needs all positions before it
    window        a token needs the last `window` positions, its own included: older blocks are given back
    state         a token needs the state after the token before it, which is a block: that of the sequence, which each step
                  replaces, or a checkpoint, which stays as it is
    """

    num_blocks: int
    window: int | None = None
    """None: not a window."""
    is_state: bool = False
    host_blocks: int = 0
    """Blocks of the host cache."""

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that the tokens from `position` on need; of states that of the checkpoint there."""
        if self.window is not None:
            return max(0, position - self.window + 1) // block_size
        return max(0, position // block_size - 1) if self.is_state else 0

    def blocks_held(self, tokens: int, block_size: int) -> int:
        """Return the most blocks that the next of at most `tokens` tokens needs, its own included."""
        if self.is_state:
            return 1
        blocks = -(-tokens // block_size)
        return blocks if self.window is None else min(blocks, (self.window + block_size - 2) // block_size + 1)

    @property
    def name(self) -> str:
        """The name in metrics and reports: "full", "window 1024", "state"."""
        if self.is_state:
            return "state"
        return "full" if self.window is None else f"window {self.window}"
