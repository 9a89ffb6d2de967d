"""What each KV block of a pool holds, and whose it is: for an engine without a model, whose tokens would never tell.

A block has at most one *writer*, the sequence it was given to, and any number of *readers*, sequences that were told its
tokens are computed already. The ledger refuses a block that somebody else may still write or read, and cached tokens that
are not in the blocks named: either would be a wrong text, later and elsewhere, in an engine with a model.

A step costs nothing here: a sequence's tokens are looked up in the sequence itself while it lives, and written down when
it ends or when somebody wants to share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from text_generation_shard.engine import NewSequence


class Holder(Protocol):
    """A sequence: its tokens, of which the first `computed` sit in `blocks`. Compared and hashed by identity."""

    tokens: list[int]
    blocks: list[int]
    computed: int


@dataclass(slots=True, eq=False)
class _Writer:
    holder: Holder
    first: int
    """Index, in its block table, of the first block that it writes; those before are read only."""
    recorded: int
    """Index of the first block whose tokens are not all written down."""


class KVLedger:
    """See the module. Blocks are numbered 0 <= block < num_blocks, which callers check."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._tenants: dict[Holder, _Writer] = {}
        self._writers: dict[int, _Writer] = {}
        self._readers: dict[int, int] = {}
        """How many sequences read a block; no entry for none."""
        self._contents = self._nothing()

    def _nothing(self) -> npt.NDArray[np.int32]:
        """[blocks, tokens in a block] token id + 1; 0 where nobody knows. Memory is taken when it is written."""
        return np.zeros((self._num_blocks, self._block_size), dtype=np.int32)

    def clear(self) -> None:
        """Nobody holds anything, and no block holds a token."""
        self._tenants.clear()
        self._writers.clear()
        self._readers.clear()
        self._contents = self._nothing()

    def admission_problem(self, admission: NewSequence) -> str | None:
        """What is wrong with the blocks of an admission; None if nothing is."""
        own = admission.computed_tokens // self._block_size
        if len(set(admission.blocks)) < len(admission.blocks):
            return "a KV block is given twice"
        return self.grant_problem(admission.blocks[own:]) or self._cached_problem(admission)

    def grant_problem(self, blocks: Sequence[int]) -> str | None:
        """What is wrong with blocks that a sequence is to write; None if nothing is."""
        if len(set(blocks)) < len(blocks):
            return "a KV block is given twice"
        if self._writers.keys().isdisjoint(blocks) and self._readers.keys().isdisjoint(blocks):
            return None
        taken = next(block for block in blocks if block in self._writers or block in self._readers)
        return f"KV block {taken} is held already"

    def admit(self, holder: Holder) -> None:
        """`holder` reads the blocks that are computed in full, and writes the others."""
        first = holder.computed // self._block_size
        writer = self._tenants[holder] = _Writer(holder, first, first)
        for block in holder.blocks[:first]:
            self._readers[block] = self._readers.get(block, 0) + 1
        self.grant(holder, holder.blocks[first:])
        # Of the block it begins in the tokens before its own are there already.
        self._record(writer)

    def grant(self, holder: Holder, blocks: Sequence[int]) -> None:
        """`holder` writes these too."""
        self._writers.update(dict.fromkeys(blocks, self._tenants[holder]))

    def end(self, holder: Holder) -> None:
        """`holder` is gone; what it computed stays until its blocks are given to another."""
        writer = self._tenants.pop(holder)
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

    def _cached_problem(self, admission: NewSequence) -> str | None:
        if not (computed := admission.computed_tokens):
            return None
        blocks = admission.blocks[: self._blocks_for(computed)]
        for writer in {writer for block in blocks if (writer := self._writers.get(block)) is not None}:
            self._record(writer)
        held = self._contents[list(blocks)].reshape(-1)[:computed]
        wrong = np.flatnonzero(held != np.array(admission.prompt[:computed], dtype=np.int32) + 1)
        if wrong.size:
            place = int(wrong[0])
            block = blocks[place // self._block_size]
            return f"the KV blocks given do not hold the prompt: token {place}, in block {block}, is another"
        return None

    def _record(self, writer: _Writer) -> None:
        """Write down what a sequence computed since it was last asked; blocks it has not come to hold nothing."""
        holder, start = writer.holder, writer.recorded
        if not (blocks := holder.blocks[start:]):
            return
        tokens = np.zeros(len(blocks) * self._block_size, dtype=np.int32)
        known = holder.tokens[start * self._block_size : holder.computed]
        tokens[: len(known)] = known
        tokens[: len(known)] += 1
        self._contents[blocks] = tokens.reshape(len(blocks), self._block_size)
        writer.recorded = holder.computed // self._block_size
