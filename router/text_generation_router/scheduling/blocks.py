"""KV blocks of one replica: which are free, which are kept for prompts to come, and who may have one.

A block is free, the prefix tree's, or one entry's. What the tree keeps and nobody uses counts as available: it is
evicted, least recently used first, when the free ones run out.
"""

from __future__ import annotations

from collections.abc import Iterable

from text_generation_router.scheduling.entry import TOKEN_BYTES, Entry
from text_generation_router.scheduling.prefix_tree import PrefixTree


class BlockPool:
    """The free KV blocks of one replica. Each block has one owner or none."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Last in, first out: a block freed a moment ago is the likeliest to be in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` free blocks. The caller has looked at `free`."""
        assert 0 <= count <= len(self._free), "more blocks taken than are free"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        """These blocks have no owner any more."""
        self._free.extend(blocks)
        assert len(self._free) <= self.num_blocks, "a block was given back twice"


class BlockCache:
    """The pool and the prefix tree over it."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tree = PrefixTree(block_size)
        self._caching = prefix_caching
        self._block_bytes = block_size * TOKEN_BYTES

    @property
    def available(self) -> int:
        """Blocks that can be had: free ones and those that the tree keeps for nobody in particular."""
        return self.pool.free + self.tree.evictable_blocks

    @property
    def in_use(self) -> int:
        """Blocks that entries hold."""
        return self.pool.num_blocks - self.available

    def cached_tokens(self, entry: Entry) -> int:
        """Leading tokens of `entry` whose KV is here. One token at least is always left to compute."""
        if not self._may_reuse(entry):
            return 0
        return self.tree.peek(entry.salt, self._reusable(entry))

    def lock_prefix(self, entry: Entry) -> None:
        """Give `entry` the blocks of its cached prefix."""
        key = self._reusable(entry) if self._may_reuse(entry) else b""
        entry.node, entry.blocks = self.tree.acquire(entry.salt, key)
        entry.published = len(entry.blocks)
        entry.cached_tokens = entry.published * self.pool.block_size

    def grow(self, entry: Entry, count: int) -> list[int]:
        """Give `entry` so many more blocks, which are available."""
        if (missing := count - self.pool.free) > 0:
            self.pool.give_back(self.tree.evict(missing))
        blocks = self.pool.take(count)
        entry.blocks += blocks
        entry.capacity = len(entry.blocks) * self.pool.block_size
        return blocks

    def publish(self, entry: Entry, computed: int) -> None:
        """The first `computed` tokens of `entry` are computed: the tree keeps the blocks they fill."""
        # An engine that schedules for itself may be ahead of the picture that is kept of it.
        whole, known = min(computed // self.pool.block_size, len(entry.blocks)), entry.published
        if not self._caching or whole <= known or entry.node is None:
            return
        in_prompt = whole * self._block_bytes <= len(entry.prompt_key)
        key = entry.prompt_key if in_prompt else entry.key
        run = entry.blocks[known:whole]
        entry.node, duplicates = self.tree.extend(
            entry.node, key[known * self._block_bytes : whole * self._block_bytes], run
        )
        entry.duplicates += run[:duplicates]
        entry.published = whole

    def free(self, entry: Entry) -> None:
        """`entry` needs its blocks no more: what was published stays in the tree, the rest is free."""
        self.pool.give_back(entry.duplicates)
        self.pool.give_back(entry.blocks[entry.published :])
        if entry.node is not None:
            self.tree.release(entry.node)

    def _may_reuse(self, entry: Entry) -> bool:
        # To score a prompt is to compute all of it; the scores come with the first token.
        return self._caching and (not entry.request.prompt_logprobs or bool(entry.generated))

    def _reusable(self, entry: Entry) -> bytes:
        bytes_of_all_but_one = (entry.length - 1) * TOKEN_BYTES
        whole = bytes_of_all_but_one - bytes_of_all_but_one % self._block_bytes
        if len(entry.reusable) != whole:  # several replicas are asked for the same one
            entry.reusable = (entry.prompt_key if whole <= len(entry.prompt_key) else entry.key)[:whole]
        return entry.reusable
