"""KVLedger: the contents and the owner of each KV block, for an engine without a model.

A block has at most one *writer*, the sequence it was assigned to, and any number of *readers*, sequences admitted with its tokens
as computed. The ledger rejects a block that another sequence may still write or read, and cached tokens that are not in the blocks
named. In an engine with a model either error would show later, as a wrong text.

A step costs nothing here: the tokens of a live sequence are read from the sequence itself. They are copied when it ends or when
another sequence wants to share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from text_generation_shard.engine import NewSequence


class Holder(Protocol):
    """A sequence: the first `computed` of its tokens are in `blocks`. Compared and hashed by identity."""

    tokens: list[int]
    blocks: list[int]
    computed: int
    adapter: str
    is_held: bool


@dataclass(slots=True, eq=False)
class _Writer:
    holder: Holder
    first: int
    """Index in its block table of the first block that it writes; earlier ones are read only."""
    recorded: int
    """Index of the first block whose tokens are not all recorded."""


class KVLedger:
    """Checks assignments of blocks. Callers check that 0 <= block < num_blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._holders: dict[Holder, _Writer] = {}
        self._writers: dict[int, _Writer] = {}
        self._readers: dict[int, int] = {}
        """Number of sequences that read a block; no entry for 0."""
        self._contents = self._empty()
        self._adapters: dict[int, str] = {}
        """The LoRA adapter with which a block was computed; no entry for none."""

    def _empty(self) -> npt.NDArray[np.int32]:
        """Return [blocks, tokens per block] of token id + 1, 0 if unknown. Memory is committed when written."""
        return np.zeros((self._num_blocks, self._block_size), dtype=np.int32)

    def clear(self) -> None:
        """Forget all owners and contents."""
        self._holders.clear()
        self._writers.clear()
        self._readers.clear()
        self._contents = self._empty()
        self._adapters.clear()

    def new_sequence_problem(self, new: NewSequence) -> str | None:
        """Return the problem with the blocks of a new sequence; None if there is none."""
        own = new.computed_tokens // self._block_size
        if len(set(new.blocks)) < len(new.blocks):
            return "a KV block is given twice"
        return self.allocation_problem(new.blocks[own:]) or self._cached_problem(new)

    def allocation_problem(self, blocks: Sequence[int]) -> str | None:
        """Return the problem with blocks to be written; None if there is none."""
        if len(set(blocks)) < len(blocks):
            return "a KV block is given twice"
        if self._writers.keys().isdisjoint(blocks) and self._readers.keys().isdisjoint(blocks):
            return None
        taken = next(block for block in blocks if block in self._writers or block in self._readers)
        return f"KV block {taken} is held already"

    def admit(self, holder: Holder) -> None:
        """Register `holder` as a reader of the fully computed blocks and as the writer of the others."""
        first = holder.computed // self._block_size
        writer = self._holders[holder] = _Writer(holder, first, first)
        for block in holder.blocks[:first]:
            self._readers[block] = self._readers.get(block, 0) + 1
        self.allocate(holder, holder.blocks[first:])
        # The first block it writes may already hold computed tokens.
        self._record(writer)

    def allocate(self, holder: Holder, blocks: Sequence[int]) -> None:
        """Register `holder` as the writer of more blocks."""
        self._writers.update(dict.fromkeys(blocks, self._holders[holder]))

    def end_dropped(self) -> None:
        """Remove the holders that are not held any more."""
        for holder in [holder for holder in self._holders if not holder.is_held]:
            self.end(holder)

    def end(self, holder: Holder) -> None:
        """Remove `holder`. Its blocks keep their contents until they are assigned again."""
        writer = self._holders.pop(holder)
        self._record(writer)
        for block in holder.blocks[writer.first :]:
            del self._writers[block]
        for block in holder.blocks[: writer.first]:
            if (readers := self._readers[block] - 1) > 0:
                self._readers[block] = readers
            else:
                del self._readers[block]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _cached_problem(self, new: NewSequence) -> str | None:
        if not (computed := new.computed_tokens):
            return None
        blocks = new.blocks[: self._blocks_for(computed)]
        for writer in {writer for block in blocks if (writer := self._writers.get(block)) is not None}:
            self._record(writer)
        if any(self._adapters.get(block, "") != new.adapter for block in blocks):
            return "the KV blocks given were computed with another LoRA adapter"
        held = self._contents[list(blocks)].reshape(-1)[:computed]
        wrong = np.flatnonzero(held != np.array(new.prompt[:computed], dtype=np.int32) + 1)
        if wrong.size:
            index = int(wrong[0])
            block = blocks[index // self._block_size]
            return f"the KV blocks given do not hold the prompt: token {index}, in block {block}, is another"
        return None

    def _record(self, writer: _Writer) -> None:
        """Record the tokens computed since the last call. Blocks not reached yet hold nothing."""
        holder, start = writer.holder, writer.recorded
        if not (blocks := holder.blocks[start:]):
            return
        for block in blocks:
            if holder.adapter:
                self._adapters[block] = holder.adapter
            else:
                self._adapters.pop(block, None)
        tokens = np.zeros(len(blocks) * self._block_size, dtype=np.int32)
        known = holder.tokens[start * self._block_size : holder.computed]
        tokens[: len(known)] = known
        tokens[: len(known)] += 1
        self._contents[blocks] = tokens.reshape(len(blocks), self._block_size)
        writer.recorded = holder.computed // self._block_size
