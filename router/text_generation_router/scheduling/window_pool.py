"""WindowPool: the blocks of one window group of a replica. A group of another kind gets a class with the same methods.

The first group of a cache is full and gives the prefix tree its structure: see `prefix_tree`. A block of a further group is
free, held by sequences, or cached. A cached one is named by a position of the tree, and can be evicted while no sequence holds
it; its position then lacks a block of this group.

Blocks behind the windows of running sequences are evicted first, unless a cached prefix may end near them: they belong to a prefix
that was reused, or to the end of a prompt. All others follow, least recently held first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from text_generation_proto.cache_groups import CacheGroup


@dataclass(slots=True, eq=False)
class GroupBlock:
    """A block of the pool. Sequences and the tree refer to it."""

    number: int
    """-1 once its position in the tree lacks it; its successor has the number."""
    holders: int = 1
    """Sequences that hold it; 1 for a free block, which the next one takes as it is."""
    is_cached: bool = False
    order: "OrderedDict[GroupBlock, None]" = field(init=False)
    """The order that has it while it can be evicted."""
    uses: int = 0
    """Sequences that continued from it, if it is a checkpoint."""
    position: int = 0
    rank: int = 0
    """The tokens before it, if it is a checkpoint, and its place in the order of eviction: see `state_pool`."""


number_of = attrgetter("number")

NO_BLOCK = GroupBlock(-1)
"""Stands at positions of the tree that lack a block."""


CONTEXT = 1 << 40
"""Blocks of a sequence so long that the most blocks are held of each group."""


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
    def __init__(self, group: CacheGroup, block_size: int) -> None:
        self.group = group
        self._block_size = block_size
        self.most_due = group.blocks_held(CONTEXT * block_size, block_size)
        """The most blocks that are due to a sequence."""
        self.most_reused = CONTEXT - group.first_block(CONTEXT * block_size, block_size)
        """The most blocks before the end of a cached prefix that a sequence needs which continues there."""
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

    def due(self, first: int, held: int, tokens: int, chunk: int = 0) -> int:
        """Return the blocks that a prompt of `tokens` tokens may need beside the `held` ones, of which block `first` is the first.

        `chunk`: the blocks of its chunks, for which there is to be room beside those of its window.
        """
        blocks = -(-tokens // self._block_size) - first
        return max(0, min(blocks, self.most_due + chunk, self.group.num_blocks) - held)

    def accepted(self, backwards: Iterable[GroupBlock], count: int) -> int:
        """Return the longest usable prefix of the first `count` blocks of a path of the tree, given last to first."""
        first, index = max(0, count - self.most_reused), count
        for block in backwards:
            if index <= first:
                break
            index -= 1
            if block.number < 0:
                first, count = max(0, index - self.most_reused), index
        return count

    def hold(self, prefix: list[GroupBlock], count: int, prompt: int, *, loaded: bool = False) -> HeldBlocks:
        """Return what a sequence holds that continues after `count` blocks to the end of its `prompt`: one more, to start with.

        `prefix`: the last ones of them, `most_reused` or all; none if they are `loaded`, to blocks of its own.
        """
        first, prompt_end = count - len(prefix), self.group.first_block(prompt, self._block_size)
        if loaded:
            first = self.group.first_block(count * self._block_size, self._block_size)
        needed_until = (first + 1) * self._block_size + (self.group.window or 0) - 1
        held = HeldBlocks(first, first + len(prefix), prefix, needed_until, count, prompt_end)
        self.keep(prefix)
        self.extend(held, count + 1)
        return held

    def keep(self, blocks: Iterable[GroupBlock]) -> None:
        """Count one more holder of cached blocks."""
        for block in blocks:
            if block.holders:
                block.holders += 1
            else:
                del block.order[block]
                block.holders = 1

    def extend(self, held: HeldBlocks, end: int) -> tuple[int, ...]:
        """Take blocks for positions up to block `end`, evicting others if needed; return their numbers."""
        if (count := end - held.end) <= 0:
            return ()
        free = self._free
        while count > len(free):
            self._evict()
        new = free[-count:]
        del free[-count:]
        held.blocks += new
        held.end = end
        return tuple(map(number_of, new))

    def give_back(self, held: HeldBlocks, position: int) -> None:
        """Drop the blocks that tokens from `position` on do not need; at least one.

        Another prompt may continue where this one did, or where it ended. Blocks that are not needed there are evicted before
        others.
        """
        first = held.first
        held.first = now = self.group.first_block(position, self._block_size)
        held.needed_until += (now - first) * self._block_size
        dropped = held.blocks[: now - first]
        del held.blocks[: now - first]
        if first < held.prompt_end:
            reused, end = max(0, held.reused - first), held.prompt_end - first
            self._drop(dropped[:reused], self._recent)
            self._drop(dropped[reused:end], self._behind)
            dropped = dropped[max(reused, end) :]
        self._drop(dropped, self._recent)

    def release(self, blocks: Iterable[GroupBlock]) -> None:
        """Drop all blocks of a sequence."""
        self._drop(blocks, self._recent)

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
        free = self._free
        for block in blocks:
            if block.number >= 0:
                del block.order[block]
                block.is_cached = False
                block.holders = 1
                free.append(block)

    def _drop(self, blocks: Iterable[GroupBlock], order: OrderedDict[GroupBlock, None]) -> None:
        free = self._free
        for block in blocks:
            if not block.is_cached:
                free.append(block)
            elif block.holders > 1:
                block.holders -= 1
            else:
                block.holders = 0
                block.order = order
                order[block] = None

    def lose(self, blocks: Iterable[GroupBlock]) -> None:
        """Let positions of the tree lack cached blocks, but for those that are held."""
        for block in blocks:
            if not block.holders and block.number >= 0:
                del block.order[block]
                self._lack(block)

    def _evict(self) -> None:
        self._lack((self._behind or self._recent).popitem(last=False)[0])

    def _lack(self, block: GroupBlock) -> None:
        self._free.append(GroupBlock(block.number))
        block.number = -1
