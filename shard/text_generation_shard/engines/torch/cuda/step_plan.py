"""What one step computes, as one row of int32: built on the host, sent to every rank and copied to the device as it is.

    header | ids | positions | slots | places | cells | blocks | pages | query indptr | page indptr | last pages

The tokens of a step lie side by side, first those of decoding rows, one each, then the chunks of prompts. `places` are the
tokens whose next one is chosen; a plan of decoding rows alone has none: all of them choose. Block tables live on the device
and are told what is new in them: `cells` of the flattened tables, and the `blocks` that go there. The last four columns are
for the chunks, in the words of FlashInfer's planner.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE
from text_generation_shard.step.sequence import Row
from text_generation_shard.step.steady import StepRows

Ints = NDArray[np.int32]

LAST_CHOSEN = -1
"""Instead of a token id: the last token chosen for the slot, which the device knows."""
COLUMNS = (
    "ids",
    "positions",
    "slots",
    "places",
    "cells",
    "blocks",
    "pages",
    "query_indptr",
    "page_indptr",
    "last_pages",
)
_COLUMN = {name: index for index, name in enumerate(COLUMNS)}
HEADER = 8
"""Numbers before the first column, of which the first six say something."""
ALIGNED = 4
"""Columns begin at multiples of so many numbers, 16 bytes: a kernel is compiled anew for a pointer that is aligned less."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long the columns of a plan are."""

    tokens: int
    places: int
    updates: int
    pages: int = 0
    chunks: int = 0

    @lru_cache(maxsize=1024)  # noqa: B019 – sizes are small, and most steps have those of the step before
    def spans(self) -> list[tuple[int, int]]:
        """Where each of COLUMNS begins and ends."""
        ends = self.chunks + 1 if self.chunks else 0
        at = HEADER
        spans = []
        for length in (*(self.tokens,) * 3, self.places, *(self.updates,) * 2, self.pages, ends, ends, self.chunks):
            spans.append((at, at + length))
            at += -(-length // ALIGNED) * ALIGNED
        return spans


Memory = Callable[[int], Ints]
"""Gives so many numbers of it."""


def any_memory(length: int) -> Ints:
    """Memory of no particular kind."""
    return np.empty(length, dtype=np.int32)


Update = tuple[int, int]
"""A cell of the flattened block tables, and the block that goes there."""


@dataclass(frozen=True, slots=True)
class Padding:
    """To what a plan of decoding rows is filled up, so that it fits a CUDA graph."""

    tokens: int
    updates: int
    slot: int
    """A slot that belongs to nobody."""
    update: Update
    """An update that changes nothing."""


@dataclass(slots=True)  # frozen, it would take four times as long to make, once a step
class StepPlan:
    """A step of one or more tokens."""

    numbers: Ints
    """The whole row; the first HEADER tell the sizes, and whether the tokens are chosen greedily with the forward pass."""
    sizes: Sizes
    spans: list[tuple[int, int]]
    greedy: bool

    @classmethod
    def blank(cls, sizes: Sizes, *, greedy: bool, memory: Memory) -> StepPlan:
        """A plan to fill in, in memory that is taken for it."""
        spans = sizes.spans()
        numbers = memory(spans[-1][1])
        numbers[:HEADER] = (sizes.tokens, sizes.places, sizes.updates, sizes.pages, sizes.chunks, greedy, 0, 0)
        return cls(numbers, sizes, spans, greedy)

    @classmethod
    def read(cls, numbers: Ints) -> StepPlan:
        """The plan that another rank has built."""
        tokens, places, updates, pages, chunks, greedy, *_ = numbers[:HEADER].tolist()
        sizes = Sizes(tokens, places, updates, pages, chunks)
        return cls(numbers, sizes, sizes.spans(), bool(greedy))

    @classmethod
    @lru_cache(maxsize=128)  # graphs have fewer sizes; without them every step has its own
    def idle(cls, padding: Padding, *, greedy: bool = True) -> StepPlan:
        """A plan of padding alone; not to be changed."""
        plan = cls.blank(Sizes(padding.tokens, 0, padding.updates), greedy=greedy, memory=any_memory)
        plan.column("ids")[:] = LAST_CHOSEN
        plan.column("positions")[:] = 0
        plan.column("slots")[:] = padding.slot
        plan.column("cells")[:], plan.column("blocks")[:] = padding.update
        return plan

    def column(self, name: str) -> Ints:
        """One of COLUMNS, to read or to write."""
        start, end = self.spans[_COLUMN[name]]
        return self.numbers[start:end]

    @property
    def decoding(self) -> int:
        """How many of the tokens are those of decoding rows."""
        return self.sizes.tokens - int(self.column("query_indptr")[-1]) if self.sizes.chunks else self.sizes.tokens

    @property
    def choosing(self) -> int:
        """How many tokens are chosen."""
        return self.sizes.places if self.sizes.chunks else self.sizes.tokens


def plan_decoding(
    rows: StepRows, updates: Sequences[Update], padding: Padding, *, greedy: bool, memory: Memory = any_memory
) -> StepPlan:
    """One token for each of `rows`, in order. There are no more rows and updates than `padding` has room for."""
    idle = StepPlan.idle(padding, greedy=greedy)
    plan = StepPlan(memory(len(idle.numbers)), idle.sizes, idle.spans, greedy)
    plan.numbers[:] = idle.numbers
    _put_decoding(plan, rows, rows.others)
    _put_updates(plan, updates)
    return plan


def plan_chunks(rows: StepRows, updates: Sequences[Update], *, greedy: bool, memory: Memory = any_memory) -> StepPlan:
    """One token for each row that decodes, then the tokens of each chunk, of which there is at least one."""
    decoding = [row for row in rows.others if not row.prefills]
    chunks = rows.others[len(decoding) :]
    first = rows.num_steady + len(decoding)
    ends = [row.start + row.length for row in chunks]
    tables = [row.sequence.blocks[: -(-end // BLOCK_SIZE)] for row, end in zip(chunks, ends, strict=True)]
    chunk_tokens = sum(row.length for row in chunks)
    places = first + sum(row.samples for row in chunks)
    sizes = Sizes(first + chunk_tokens, places, len(updates), pages=sum(map(len, tables)), chunks=len(chunks))
    plan = StepPlan.blank(sizes, greedy=greedy, memory=memory)
    _put_decoding(plan, rows, decoding)
    ids, positions, slots = plan.column("ids"), plan.column("positions"), plan.column("slots")
    ids[:first] = LAST_CHOSEN
    choosing = list(range(first))
    at = first
    for row, end in zip(chunks, ends, strict=True):
        after = at + row.length
        ids[at:after] = row.sequence.tokens[row.start : end]
        positions[at:after] = np.arange(row.start, end, dtype=np.int32)
        slots[at:after] = row.sequence.slot
        if row.samples:
            choosing.append(after - 1)
        at = after
    plan.column("places")[:] = choosing
    _put_updates(plan, updates)
    plan.column("pages")[:] = [block for table in tables for block in table]
    plan.column("query_indptr")[:] = np.cumsum([0, *(row.length for row in chunks)])
    plan.column("page_indptr")[:] = np.cumsum([0, *map(len, tables)])
    plan.column("last_pages")[:] = [(end - 1) % BLOCK_SIZE + 1 for end in ends]
    return plan


def _put_decoding(plan: StepPlan, rows: StepRows, decoding: Sequences[Row]) -> None:
    """Where the steady rows are, and those of the others that decode; their tokens are known to the device."""
    positions, slots = plan.column("positions"), plan.column("slots")
    first = rows.num_steady
    if rows.steady is not None:
        positions[:first] = rows.steady.starts
        slots[:first] = rows.steady.slots
    if decoding:
        count = first + len(decoding)
        positions[first:count] = [row.start for row in decoding]
        slots[first:count] = [row.sequence.slot for row in decoding]


def _put_updates(plan: StepPlan, updates: Sequences[Update]) -> None:
    if updates:
        plan.column("cells")[: len(updates)] = [cell for cell, _ in updates]
        plan.column("blocks")[: len(updates)] = [block for _, block in updates]
