"""KVLedger: the contents and the owner of each KV block, for an engine without a model.

A block has at most one *writer*, the sequence it was assigned to, and any number of *readers*, sequences admitted with its tokens
as computed. The ledger rejects a block that another sequence may still write or read, and cached tokens that are not in the blocks
named. In an engine with a model either error would show later, as a wrong text.

A step costs nothing here: the tokens of a live sequence are read from the sequence itself. They are copied when it ends or when
another sequence wants to share them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from text_generation_proto.cache_groups import CacheGroup
from text_generation_shard.engine import NewSequence
from text_generation_shard.step.sequence import Sequence as HeldSequence


class Holder(Protocol):
    """A sequence: the first `computed` of its tokens are in `blocks`. Compared and hashed by identity."""

    tokens: list[int]
    blocks: list[int]
    computed: int
    adapter: str
    is_held: bool


class KVLedger:
    """Checks assignments of blocks. Callers check that 0 <= block < num_blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._holders: dict[Holder, int] = {}
        """Index in its block table of the first block that a sequence writes; earlier ones it reads only."""
        self._writers: dict[int, Holder] = {}
        self._readers = Counter[int]()
        """Number of sequences that read a block; no entry for 0."""
        self._contents = np.zeros((num_blocks, block_size), dtype=np.int32)
        """[blocks, tokens per block] of token id + 1, 0 if unknown. Memory is committed when written."""
        self._adapters: dict[int, str] = {}
        """The LoRA adapter with which a block was computed; no entry for none."""

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
        first = self._holders[holder] = holder.computed // self._block_size
        self._readers.update(holder.blocks[:first])
        self.allocate(holder, holder.blocks[first:])
        # The first block it writes may already hold computed tokens.
        self._record(holder)

    def allocate(self, holder: Holder, blocks: Sequence[int]) -> None:
        """Register `holder` as the writer of more blocks."""
        self._writers.update(dict.fromkeys(blocks, holder))

    def end_dropped(self) -> None:
        """Remove the holders that are not held any more."""
        for holder in [holder for holder in self._holders if not holder.is_held]:
            self.end(holder)

    def end(self, holder: Holder) -> None:
        """Remove `holder`. Its blocks keep their contents until they are assigned again."""
        self._record(holder)
        first = self._holders.pop(holder)
        for block in holder.blocks[first:]:
            del self._writers[block]
        self._readers -= Counter(holder.blocks[:first])

    def read(self, block: int) -> object:
        """Return the contents of a block."""
        if (writer := self._writers.get(block)) is not None:
            self._record(writer)
        return self._contents[block].tolist(), self._adapters.get(block, "")

    def write(self, block: int, content: object) -> None:
        """Set the contents of a block that no sequence holds; None: it holds nothing."""
        assert self.allocation_problem((block,)) is None
        tokens, adapter = content if isinstance(content, tuple) else (0, "")
        self._contents[block] = tokens
        self._adapters[block] = adapter

    def _cached_problem(self, new: NewSequence) -> str | None:
        if not (computed := new.computed_tokens):
            return None
        blocks = new.blocks[: -(-computed // self._block_size)]
        for writer in {self._writers[block] for block in blocks if block in self._writers}:
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

    def _record(self, holder: Holder) -> None:
        """Record the tokens computed so far in the blocks that it writes. Blocks not reached yet hold nothing."""
        first = self._holders[holder]
        blocks = holder.blocks[first:]
        for block in blocks:
            if holder.adapter:
                self._adapters[block] = holder.adapter
            else:
                self._adapters.pop(block, None)
        tokens = np.zeros(len(blocks) * self._block_size, dtype=np.int32)
        known = holder.tokens[first * self._block_size : holder.computed]
        tokens[: len(known)] = known
        tokens[: len(known)] += 1
        self._contents[blocks] = tokens.reshape(len(blocks), self._block_size)


class StateLedger:
    """The contents of the blocks of a group of states: the hash of the text of which each is the state."""

    def __init__(self, group: CacheGroup) -> None:
        self._contents = [0] * group.num_blocks
        self._texts: dict[HeldSequence, tuple[int, int]] = {}
        """The computed tokens of each sequence, and their hash."""
        self._blocks: dict[HeldSequence, list[tuple[int, int]]] = {}
        """The blocks of the states of each, with the positions of the first tokens that write to them."""

    def record(self, held: Iterable[HeldSequence]) -> str | None:
        """Write the states after what was computed since the last call; return the problem with one that is needed, or None."""
        known = dict(self._texts)
        for sequence in {**self._texts, **dict.fromkeys(held)}:
            length, text = known.get(sequence, (0, hash(sequence.adapter)))
            blocks = self._blocks.get(sequence, [])
            for position, token in enumerate(sequence.tokens[length : sequence.computed], length):
                text = hash((text, token))
                if blocks:  # what a new one finds computed was written by others
                    _, block = max(each for each in blocks if each[0] <= position)
                    self._contents[block] = text
            known[sequence] = sequence.computed, text
        self._texts = {sequence: text for sequence, text in known.items() if sequence.is_held}
        self._blocks = {each: [(0, each.state_write), *each.states_ahead] for each in self._texts}
        for sequence, (length, text) in self._texts.items():
            if length and self._contents[sequence.state_read] != text:
                return f"slot {sequence.slot} needs the state after {length} tokens, block {sequence.state_read} has another"
        return None

    def read(self, block: int) -> object:
        """Return the contents of a block."""
        return self._contents[block]

    def write(self, block: int, content: object) -> None:
        """Set the contents of a block; None: it holds nothing."""
        assert isinstance(content, int | None)
        self._contents[block] = content or 0


class WindowLedger:
    """The contents of the blocks of a window group, position by position: the hash of the text up to each.

    Blocks may be given to others while their holder runs. The ledger finds one that its holder still needs, by what it holds.
    """

    def __init__(self, number: int, group: CacheGroup, block_size: int) -> None:
        self._number, self._group, self._size = number, group, block_size
        self._contents = [0] * (group.num_blocks * block_size)
        self._texts: dict[HeldSequence, list[int]] = {}
        """The hashes of the computed positions of each sequence."""

    def record(self, held: Iterable[HeldSequence]) -> str | None:
        """Write what was computed since the last call; return the problem with what the next tokens need, None if there is none."""
        known = self._texts
        # Those that ended have written too.
        for sequence, text in {**known, **{each: [] for each in held if each not in known}}.items():
            first = len(text)
            while len(text) < sequence.computed:
                text.append(hash((text[-1] if text else sequence.adapter, sequence.tokens[len(text)])))
            if sequence in known:  # what a new one finds computed was written by others
                for position in range(first, sequence.computed):
                    self._contents[self._place(sequence, position)] = text[position]
            known[sequence] = text
        self._texts = {sequence: text for sequence, text in known.items() if sequence.is_held}
        for sequence, text in self._texts.items():
            block = self._group.first_block(sequence.computed, self._size)
            for position in range(block * self._size, sequence.computed):
                if self._contents[self._place(sequence, position)] != text[position]:
                    return f"slot {sequence.slot} needs position {position}, and block {block} holds another text"
        return None

    def read(self, block: int) -> object:
        """Return the contents of a block."""
        return self._contents[block * self._size : (block + 1) * self._size]

    def write(self, block: int, content: object) -> None:
        """Set the contents of a block; None: it holds nothing."""
        self._contents[block * self._size : (block + 1) * self._size] = (
            content if isinstance(content, list) else [0] * self._size
        )

    def _place(self, sequence: HeldSequence, position: int) -> int:
        return sequence.tables[self._number][position // self._size] * self._size + position % self._size
