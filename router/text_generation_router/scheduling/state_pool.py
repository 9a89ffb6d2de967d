"""StatePool: the blocks of the group of states of a replica. Each is the state of a sequence, or a checkpoint.

To the prefix tree a group of states is a window of one block: a position has a block if a checkpoint is there, the state after its
tokens, and a prefix is usable if its last position has one. A sequence that continues from a checkpoint holds it until its first
chunk is computed. Where it leaves one, the tokens after that write to another block; the block before is cached when the tree gets
the tokens before it. A chunk leaves at most one before its end, and one there.

Evicted first: spare checkpoints, and those from which one sequence has gone on to leave another checkpoint, as each turn of a chat
does. All others follow by their rank, as in GreedyDual-Size-Frequency (Cherkasova 1998): the tokens that a checkpoint saves, once more
for each sequence that continued from it, plus the rank of the one that was evicted last when it was held last. By last use alone, each
session would lose its checkpoint before its next turn where more are active than states.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from text_generation_proto.cache_groups import CacheGroup
from text_generation_router.scheduling.checkpoints import StateCheckpoint
from text_generation_router.scheduling.lazy_heap import LazyHeap
from text_generation_router.scheduling.window_pool import NO_BLOCK, GroupBlock, WindowPool


@dataclass(slots=True)
class HeldStates:
    current: GroupBlock
    """The block to which its last chunk writes. While there is one in `after`, it is a checkpoint."""
    source: Sequence[GroupBlock]
    """The checkpoint from which it continues, until its first chunk is computed."""
    wanted: list[StateCheckpoint]
    """The checkpoints that it is to leave, the last one first."""
    kept: dict[int, GroupBlock] = field(default_factory=dict)
    """The checkpoints that it left and still holds, by the index of the block that they end."""
    spare: set[int] = field(default_factory=set)
    """The indices of spare ones."""
    after: list[GroupBlock] = field(default_factory=list)
    """The block of the chunk after a checkpoint, until that is scheduled."""

    @property
    def blocks(self) -> Iterable[GroupBlock]:
        return chain(self.source, self.kept.values(), self.after or (self.current,))

    def between(self, first: int, end: int) -> list[GroupBlock]:
        """Return its checkpoints at a range of blocks; NO_BLOCK where there is none."""
        blocks = [NO_BLOCK] * (end - first)
        for index, block in self.kept.items():
            if first <= index < end:
                blocks[index - first] = block
        return blocks

    def leave(self, position: int) -> None:
        """Leave a checkpoint at `position` too, which is not scheduled and before the end of the prompt."""
        self.wanted = sorted({*self.wanted, StateCheckpoint(position)}, reverse=True)

    def leaves_within(self, first: int, end: int, block_size: int) -> bool:
        """Return True if it left a checkpoint in positions [first, end], or is to leave one."""
        positions = (*((index + 1) * block_size for index in self.kept), *(each.position for each in self.wanted))
        return any(first <= position <= end for position in positions)


class StatePool(WindowPool):
    def __init__(self, group: CacheGroup, block_size: int) -> None:
        super().__init__(group, block_size)
        self._evicted_rank = 0
        # Has those of `_recent`, and some that are held meanwhile: their ranks only grow.
        self._ranked = LazyHeap[GroupBlock](lambda block: (block.rank, block.number))

    def has_room(self, prefix: Iterable[GroupBlock]) -> bool:
        """Return True if there is a block for a sequence that continues from `prefix`, its checkpoint or none."""
        return self.available > sum(1 for block in prefix if not block.holders)

    def start(
        self, prefix: Sequence[GroupBlock], wanted: list[StateCheckpoint], loaded: int = 0, *, returns: bool = False
    ) -> HeldStates:
        """Return what a sequence holds that continues from `prefix`, its checkpoint or none.

        `loaded`: the position of one that is loaded, to a block of its own; 0: none is. `returns`: its next turn can continue
        there too. For example, a template drops the reasoning before a call with the next question: the prompt with the result of the
        call and the one with the next question both continue from the checkpoint of the first question.
        """
        if loaded:
            prefix = (self._take(),)
            prefix[0].position = loaded
        else:
            self.keep(prefix)
        for block in prefix:
            # Its first use lets a further checkpoint replace it. In the example, that is the use by the next question.
            block.uses += not (returns and wanted)
        return HeldStates(self._take(), prefix, wanted)

    def chunk_scheduled(self, held: HeldStates, end: int) -> list[tuple[int, int]]:
        """Record a chunk that ends at position `end`.

        Return the new blocks to which it writes, each after the position of the first token that does.
        """
        new = [(held.current.position, block.number) for block in held.after]
        if held.after:
            (held.current,) = held.after
            held.after = []
        while held.wanted and held.wanted[-1].position <= end:
            position, is_spare = held.wanted.pop()
            if self._free if is_spare else self.available:
                index = position // self._block_size - 1
                held.kept[index] = held.current
                held.current.position = position
                if is_spare:
                    held.spare.add(index)
                after = self._take()
                if position == end:
                    held.after = [after]
                else:
                    held.current = after
                    new.append((position, after.number))
        return new

    def settle(self, held: HeldStates, position: int) -> None:
        """Drop what is not needed once the tokens before `position`, some of this sequence, are computed and cached."""
        leaves = any(not each.is_spare for each in held.wanted) or any(index not in held.spare for index in held.kept)
        for block in held.source:
            self._drop((block,), self._behind if leaves and block.uses == 1 else self._recent)
        held.source = ()
        for index in [index for index in held.kept if (index + 1) * self._block_size < position]:
            self._drop((held.kept.pop(index),), self._behind if index in held.spare else self._recent)

    def _take(self) -> GroupBlock:
        if not self._free:
            self._evict()
        block = self._free.pop()
        block.uses = 0
        return block

    def _drop(self, blocks: Iterable[GroupBlock], order: OrderedDict[GroupBlock, None]) -> None:
        dropped = list(blocks)
        for block in dropped:
            block.rank = self._evicted_rank + (1 + block.uses) * block.position
        super()._drop(dropped, order)
        for block in dropped:
            if block in self._recent:
                self._ranked.put(block)
            else:
                self._ranked.discard(block)

    def _evict(self) -> None:
        if not self._behind:
            while (first := self._ranked.first()) is not None and first not in self._recent:
                self._ranked.discard(first)
            assert first is not None
            self._evicted_rank = first.rank
            self._ranked.discard(first)
            self._recent.move_to_end(first, last=False)
        super()._evict()
