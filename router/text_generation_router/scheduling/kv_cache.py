"""KVCache: the KV blocks of one replica, and the block tables of its sequences.

A block is free, owned by the prefix tree, or owned by one sequence. Blocks of the tree that no sequence uses count as
available: they are evicted, least recently used first, when the free ones run out.

A sequence gets the blocks of its prompt and a few for growth, not for its maximum length. Once fewer than LOW_ROOM
positions are free it is due for more blocks. Below URGENT_ROOM it is served at the next step boundary, together with all
others that are due.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from text_generation_router.request import RequestId
from text_generation_router.scheduling.prefix_tree import PrefixTree
from text_generation_router.scheduling.sequence import TOKEN_BYTES, ScheduledSequence

LOW_ROOM = 24
URGENT_ROOM = 8
"""Free positions of a sequence."""


class KVCache:
    """The KV blocks of one replica, with a prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tree = PrefixTree(block_size)
        self.urgent = False
        """True if a sequence needs blocks at the next step boundary."""
        self._caching = prefix_caching
        self._block_bytes = block_size * TOKEN_BYTES
        # Last in, first out: a block freed just now is likely still in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._growing: dict[RequestId, ScheduledSequence] = {}
        """Running sequences with little room."""

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free and evictable ones."""
        return len(self._free) + self.tree.evictable_blocks

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def stop_caching(self) -> None:
        """Reuse no cached prefix and keep none from now on. What sequences share already stays."""
        self._caching = False

    def cached_tokens(self, sequence: ScheduledSequence) -> int:
        """Return the leading tokens of `sequence` that are cached. At least one token is left to compute."""
        if not self._may_reuse(sequence):
            return 0
        return self.tree.peek(sequence.salt, self._reusable_key(sequence))

    def lock_prefix(self, sequence: ScheduledSequence) -> None:
        """Give `sequence` the blocks of its cached prefix."""
        key = self._reusable_key(sequence) if self._may_reuse(sequence) else b""
        sequence.prefix_lock, sequence.blocks = self.tree.acquire(sequence.salt, key)
        sequence.committed_blocks = len(sequence.blocks)
        sequence.cached_tokens = sequence.committed_blocks * self.block_size
        known = self.tree.known_blocks(sequence.prefix_lock, sequence.request.qos.tenant)
        sequence.own_cached_tokens = known * self.block_size

    def allocate(self, sequence: ScheduledSequence, count: int) -> list[int]:
        """Give `sequence` `count` more blocks and return them. They must be available."""
        free = self._free
        if (missing := count - len(free)) > 0:
            self._put_free(self.tree.evict(missing))
        assert 0 <= count <= len(free), "more blocks allocated than are free"
        blocks = [free.pop() for _ in range(count)]
        sequence.blocks += blocks
        sequence.capacity = len(sequence.blocks) * self.block_size
        return blocks

    def commit(self, sequence: ScheduledSequence, computed: int) -> None:
        """Move the full blocks of the first `computed` tokens, whose KV is computed, to the prefix tree."""
        # A self-scheduling engine may have computed more than the blocks planned for it here hold.
        full, known = min(computed // self.block_size, len(sequence.blocks)), sequence.committed_blocks
        if not self._caching or sequence.prefix_lock is None or sequence.request.replayed:
            return
        tenant = sequence.request.qos.tenant
        if full <= known:
            self.tree.claim(sequence.prefix_lock, tenant)
            return
        in_prompt = full * self._block_bytes <= len(sequence.prompt_key)
        key = sequence.prompt_key if in_prompt else sequence.key
        run = sequence.blocks[known:full]
        sequence.prefix_lock, duplicates = self.tree.extend(
            sequence.prefix_lock, key[known * self._block_bytes : full * self._block_bytes], run, tenant
        )
        self.tree.claim(sequence.prefix_lock, tenant)
        sequence.duplicate_blocks += run[:duplicates]
        sequence.committed_blocks = full

    def free(self, sequence: ScheduledSequence) -> None:
        """Free the blocks of `sequence`. Committed ones stay in the tree."""
        self._put_free(sequence.duplicate_blocks)
        self._put_free(sequence.blocks[sequence.committed_blocks :])
        if sequence.prefix_lock is not None:
            self.tree.release(sequence.prefix_lock)

    def _put_free(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)
        assert len(self._free) <= self.num_blocks, "a block is freed once"

    def _may_reuse(self, sequence: ScheduledSequence) -> bool:
        # Prompt log-probabilities need the whole prompt computed. They arrive with the first new token.
        request = sequence.request
        return self._caching and not request.replayed and (not request.logprobs.prompt or bool(sequence.generated))

    def _reusable_key(self, sequence: ScheduledSequence) -> bytes:
        bytes_of_all_but_one = (sequence.length - 1) * TOKEN_BYTES
        size = bytes_of_all_but_one - bytes_of_all_but_one % self._block_bytes
        if len(sequence.reusable_key) != size:  # kept, as several replicas are asked
            key = sequence.prompt_key if size <= len(sequence.prompt_key) else sequence.key
            sequence.reusable_key = key[:size]
        return sequence.reusable_key

    def check_room(self, sequence: ScheduledSequence) -> None:
        """Note `sequence` for more blocks if it is near the end of its block table."""
        room = sequence.capacity - sequence.length
        if room < LOW_ROOM and sequence.capacity < sequence.max_length:
            self._growing[sequence.id] = sequence
            self.urgent = self.urgent or room < URGENT_ROOM

    def stop_growth(self, sequence: ScheduledSequence) -> None:
        self._growing.pop(sequence.id, None)

    def grow(
        self, growth_tokens: int, running: int
    ) -> tuple[list[tuple[int, tuple[int, ...]]], list[ScheduledSequence]]:
        """If it is urgent, allocate blocks to all sequences with little room, oldest first.

        Return the allocations as (slot, blocks), and the stalled sequences: those without room that got no block.
        """
        allocations: list[tuple[int, tuple[int, ...]]] = []
        stalled: list[ScheduledSequence] = []
        if not self.urgent:
            return allocations, stalled
        for sequence in sorted(self._growing.values(), key=lambda sequence: sequence.arrival):
            wanted = self.blocks_for(min(sequence.length + growth_tokens, sequence.max_length)) - len(sequence.blocks)
            # All blocks that are wanted while the others could still get one each; else only the next one.
            count = wanted if self.available >= wanted + running else min(1, wanted, self.available)
            if blocks := self.allocate(sequence, count):
                allocations.append((sequence.slot, tuple(blocks)))
                del self._growing[sequence.id]
            elif sequence.length > sequence.capacity:
                stalled.append(sequence)
        self.urgent = any(each.capacity - each.length < URGENT_ROOM for each in self._growing.values())
        return allocations, stalled

    def check_invariants(self, sequences: Set[ScheduledSequence]) -> None:
        """Raise AssertionError unless each block has one owner: free, tree, or one of `sequences`, all that have blocks."""
        owned = [*self._free, *(block for node in self.tree.nodes() for block in node.blocks)]
        locks = []
        for sequence in sequences:
            assert sequence.prefix_lock is not None
            locks.append(sequence.prefix_lock)
            committed = sequence.committed_blocks
            owned += (*sequence.duplicate_blocks, *sequence.blocks[committed:])
            known = {*self.tree.blocks_to(sequence.prefix_lock), *sequence.duplicate_blocks}
            assert len(self.tree.blocks_to(sequence.prefix_lock)) == committed
            assert known >= set(sequence.blocks[:committed])
            computed = max(sequence.num_computed_tokens, sequence.num_kv_tokens)
            assert committed * self.block_size <= computed, "only computed blocks are committed"
            assert sequence.capacity == len(sequence.blocks) * self.block_size
        assert sorted(owned) == list(range(self.num_blocks)), "each block has one owner"
        growing = set(self._growing.values())
        assert growing <= sequences
        assert all(each.capacity - each.length < LOW_ROOM and each.capacity < each.max_length for each in growing)
        self.tree.check_invariants(locks)
