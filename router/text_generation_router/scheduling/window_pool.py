"""WindowPool: the blocks of one window group of a replica. A group of another kind gets a class with the same methods.

The first group of a cache is full and gives the prefix tree its structure: see `prefix_tree`. A block of a further group is
free, held by sequences, or cached. A cached one is named by a position of the tree, and can be evicted while no sequence holds
it; its position then lacks a block of this group.

Blocks behind the windows of running sequences are evicted first, unless a cached prefix may end near them: they belong to a prefix
that was reused, or to the end of a prompt. All others follow, least recently held first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from text_generation_proto.cache_groups import CacheGroup


class GroupBlock:
    """A block of the pool. Sequences and the tree refer to it."""

    __slots__ = ("holders", "is_cached", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        """-1 once its position in the tree lacks it; its successor has the number."""
        self.holders = 1
        """Sequences that hold it; 1 for a free block, which the next one takes as it is."""
        self.is_cached = False


NO_BLOCK = GroupBlock(-1)
"""Stands at positions of the tree that lack a block."""


@dataclass(slots=True)
class HeldBlocks:
    """The blocks of a sequence in one group: those of positions in blocks [first, end)."""

    first: int = 0
    end: int = 0
    blocks: list[GroupBlock] = field(default_factory=list)
    needed_until: int = 0
    """The position whose token does not need the first block any more."""
    reused: int = 0
    """Blocks of the prefix with which it came."""
    prompt_end: int = 0
    """The first block that is needed at the end of its prompt."""

    def between(self, first: int, end: int) -> list[GroupBlock]:
        """Return the blocks of a range that ends within those held; NO_BLOCK where it was given back."""
        missing = min(max(0, self.first - first), end - first)
        return [NO_BLOCK] * missing + self.blocks[first + missing - self.first : end - self.first]


class WindowPool:
    """The blocks of one group."""

    def __init__(self, group: CacheGroup, block_size: int) -> None:
        self.group = group
        self._block_size = block_size
        self._free = [GroupBlock(number) for number in range(group.num_blocks - 1, -1, -1)]
        # Evictable blocks, first to last.
        self._behind: OrderedDict[GroupBlock, None] = OrderedDict()
        self._recent: OrderedDict[GroupBlock, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be taken: free and evictable ones."""
        return len(self._free) + len(self._behind) + len(self._recent)

    @property
    def used(self) -> int:
        return self.group.num_blocks - self.available

    def due(self, held: HeldBlocks, tokens: int) -> int:
        """Return the blocks that a sequence of `tokens` tokens may need beside those it holds."""
        return max(0, self.group.blocks_held(tokens, self._block_size) - len(held.blocks))

    def accepted(self, blocks: Sequence[GroupBlock], count: int) -> int:
        """Return the longest usable prefix of `blocks`, those of a path of the tree, of at most `count` blocks."""
        first, index = self._first_before(count), count
        for block in reversed(blocks[:count]):
            if index <= first:
                break
            index -= 1
            if block.number < 0:
                first, count = self._first_before(index), index
        return count

    def _first_before(self, count: int) -> int:
        """Return the first block that a sequence needs that continues after `count` blocks."""
        return self.group.first_block(count * self._block_size, self._block_size)

    def hold(self, blocks: Sequence[GroupBlock], prompt: int) -> HeldBlocks:
        """Return what a sequence holds that continues after `blocks`, a usable path of the tree, to the end of its `prompt`."""
        first, count = self._first_before(len(blocks)), len(blocks)
        prompt_end = self.group.first_block(prompt, self._block_size)
        held = HeldBlocks(first, count, list(blocks[first:]), self._needed_until(first), count, prompt_end)
        for block in held.blocks:
            if not block.holders:
                self._remove_evictable(block)
            block.holders += 1
        return held

    def extend(self, held: HeldBlocks, end: int) -> tuple[int, ...]:
        """Take blocks for positions up to block `end`, evicting others if needed; return their numbers."""
        if (count := end - held.end) <= 0:
            return ()
        free = self._free
        while count > len(free):
            self._evict(next(iter(self._behind or self._recent)))
        new = free[-count:]
        del free[-count:]
        held.blocks += new
        held.end = end
        return tuple([block.number for block in new])

    def give_back(self, held: HeldBlocks, position: int) -> None:
        """Drop the blocks that tokens from `position` on do not need; at least one.

        Another prompt may continue where this one did, or where it ended. Blocks that are not needed there are evicted before
        others.
        """
        first = held.first
        held.first = self.group.first_block(position, self._block_size)
        held.needed_until = self._needed_until(held.first)
        dropped = held.blocks[: held.first - first]
        del held.blocks[: held.first - first]
        if first < held.prompt_end:
            reused, end = max(0, held.reused - first), held.prompt_end - first
            self._drop(dropped[:reused], self._recent)
            self._drop(dropped[reused:end], self._behind)
            dropped = dropped[max(reused, end) :]
        self._drop(dropped, self._recent)

    def _needed_until(self, block: int) -> int:
        return (block + 1) * self._block_size + (self.group.window or 0) - 1

    def release(self, held: HeldBlocks) -> None:
        """Drop all blocks of a sequence."""
        self._drop(held.blocks, self._recent)

    def cache(self, blocks: list[GroupBlock], new: Sequence[GroupBlock], first: int) -> None:
        """Cache `new` at the positions of the tree in `blocks` from index `first` on that lack a block, or are appended."""
        if first == len(blocks):
            blocks += new
            for block in new:
                block.is_cached = True
            return
        for index, block in enumerate(new, first):
            if blocks[index].number < 0:
                blocks[index] = block
                block.is_cached = True

    def forget(self, blocks: Iterable[GroupBlock]) -> None:
        """Free the blocks of positions that the tree evicts: no sequence holds them."""
        for block in blocks:
            if block.number >= 0:
                self._remove_evictable(block)
                block.is_cached, block.holders = False, 1
                self._free.append(block)

    def _drop(self, blocks: Sequence[GroupBlock], evictable: dict[GroupBlock, None]) -> None:
        for block in blocks:
            if not block.is_cached:
                self._free.append(block)
            elif block.holders > 1:
                block.holders -= 1
            else:
                block.holders = 0
                evictable[block] = None

    def _remove_evictable(self, block: GroupBlock) -> None:
        if self._behind.pop(block, block) is not None:
            del self._recent[block]

    def _evict(self, block: GroupBlock) -> None:
        self._remove_evictable(block)
        self._free.append(GroupBlock(block.number))
        block.number = -1

    def check_invariants(self, cached: Iterable[GroupBlock], held: Sequence[HeldBlocks]) -> None:
        """Raise AssertionError unless each block has one owner; `cached`: those of the tree, `held`: those of all sequences."""
        in_tree = [block for block in cached if block.number >= 0]
        holders: dict[GroupBlock, int] = {}
        for each in held:
            assert each.end == each.first + len(each.blocks)
            for block in each.blocks:
                holders[block] = holders.get(block, 0) + 1
        assert all(block.holders == count and block.number >= 0 for block, count in holders.items())
        assert all(block.is_cached for block in in_tree)
        own = [block for block in holders if not block.is_cached]
        assert {*self._behind, *self._recent} == {block for block in in_tree if block not in holders}
        assert not self._behind.keys() & self._recent.keys()
        assert all(block.holders == 1 for block in (*self._free, *own))
        numbers = [block.number for block in (*self._free, *in_tree, *own)]
        assert sorted(numbers) == list(range(self.group.num_blocks)), "each block has one owner"
        assert {block for block in holders if block.is_cached} <= set(in_tree)
