"""The plan of a step, as one int32 array: built on the host, broadcast to every rank and copied to the device unchanged.

    header | ids | positions | slots | behind | sampling | cells | blocks | pages | query indptr | page indptr | last pages
        | state reads | state writes | state checkpoints | state rests

The tokens of decode rows come first, one each and its drafts, then the tokens of prompt chunks. `behind` has the drafts of a row
that were right and are not in its state. `sampling` holds the indices of the tokens whose successor is sampled; a plan without
chunks has none, because all its tokens sample. Block tables stay on the device and are updated: `cells` are indices into the
flattened tables of all groups, `blocks` the new values. The columns from `pages` to `last pages` are the inputs of FlashInfer's
planner for the chunks, the last four are those of their states: see `StateChunk`. `pages` and `page_indptr` have a part for each
group; that of a window group begins with the first block that a chunk needs.
"""

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Self

import numpy as np
from numpy.typing import NDArray

from text_generation_proto.cache_groups import CacheGroup
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.step.sequence import StepRow, StepRows

Ints = NDArray[np.int32]

STATE_COLUMNS = "state_reads", "state_writes", "state_checkpoints", "state_rests"
"""In the order of the fields of `StateRows`."""
LAST_SAMPLED = -1
"""Instead of a token id: the last token sampled for the slot, which is on the device."""
COLUMNS = (
    "ids",
    "positions",
    "slots",
    "behind",
    "sampling",
    "cells",
    "blocks",
    "pages",
    "query_indptr",
    "page_indptr",
    "last_pages",
    *STATE_COLUMNS,
)
TOKEN_COLUMNS = 4
"""The first columns have a number for each token."""
_COLUMN = {name: index for index, name in enumerate(COLUMNS)}
HEADER = 8
"""Length of the header."""
ADAPTED = 7
"""The number of the header that says whether a token has a LoRA adapter."""
ALIGNMENT = 4
"""Columns start at multiples of this many numbers, 16 bytes: Triton compiles a separate kernel for less aligned pointers."""


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Lengths of the columns of a plan."""

    tokens: int
    sampling: int
    updates: int
    pages: int = 0
    chunks: int = 0
    groups: int = 1
    """Groups of KV blocks."""

    @lru_cache(maxsize=1024)  # noqa: B019 – instances are small, and most steps have the sizes of the previous one
    def bounds(self) -> list[tuple[int, int]]:
        """Return the start and end of each of COLUMNS."""
        ends = self.chunks + 1 if self.chunks else 0
        at = HEADER
        bounds = []
        pages = (
            self.pages,
            ends,
            (self.groups - 1) * aligned(ends) + ends,
            self.chunks,
            *(self.chunks,) * len(STATE_COLUMNS),
        )
        for length in (*(self.tokens,) * TOKEN_COLUMNS, self.sampling, *(self.updates,) * 2, *pages):
            bounds.append((at, at + length))
            at += aligned(length)
        return bounds


def aligned(length: int) -> int:
    """Return the distance of columns of this length."""
    return -(-length // ALIGNMENT) * ALIGNMENT


Allocate = Callable[[int], Ints]
"""Allocates an array of the given length."""


def pageable_memory(length: int) -> Ints:
    return np.empty(length, dtype=np.int32)


TableUpdate = tuple[int, int]
"""A cell of the flattened block tables, and its new block."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Size of a padded decode plan, to fit a CUDA graph."""

    tokens: int
    updates: int
    slot: int
    """The dummy slot."""
    update: TableUpdate
    """An update without effect."""


@dataclass(slots=True)  # not frozen: creating it would take four times as long, once per step
class StepPlan:
    """The plan of a step of one or more tokens."""

    numbers: Ints
    """The whole array; the header holds the sizes, and whether tokens are sampled greedily in the forward pass."""
    sizes: PlanSizes
    bounds: list[tuple[int, int]]
    greedy: bool
    adapted: bool = False
    """True if a token has a LoRA adapter."""

    @classmethod
    def blank(cls, sizes: PlanSizes, *, greedy: bool, memory: Allocate) -> Self:
        """Allocate a plan with `memory`; the columns are not initialized."""
        bounds = sizes.bounds()
        numbers = memory(bounds[-1][1])
        header = sizes.tokens, sizes.sampling, sizes.updates, sizes.pages, sizes.chunks, greedy, sizes.groups, 0
        numbers[:HEADER] = header
        return cls(numbers, sizes, bounds, greedy)

    @classmethod
    def read(cls, numbers: Ints) -> Self:
        """Return the plan in an array received from rank 0."""
        tokens, sampling, updates, pages, chunks, greedy, groups, adapted = numbers[:HEADER].tolist()
        sizes = PlanSizes(tokens, sampling, updates, pages, chunks, groups)
        return cls(numbers, sizes, sizes.bounds(), bool(greedy), bool(adapted))

    def with_adapters(self) -> Self:
        """Return this plan, whose tokens have adapters."""
        self.numbers[ADAPTED] = self.adapted = True
        return self

    @classmethod
    @lru_cache(maxsize=128)  # one per capture size; without graphs, one per step size
    def dummy(cls, padding: Padding, *, greedy: bool = True) -> Self:
        """Return a plan of padding only; must not be modified."""
        plan = cls.blank(PlanSizes(padding.tokens, 0, padding.updates), greedy=greedy, memory=pageable_memory)
        plan.column("ids")[:] = LAST_SAMPLED
        plan.column("positions")[:] = 0
        plan.column("slots")[:] = padding.slot
        plan.column("behind")[:] = 0
        plan.column("cells")[:], plan.column("blocks")[:] = padding.update
        return plan

    def column(self, name: str) -> Ints:
        start, end = self.bounds[_COLUMN[name]]
        return self.numbers[start:end]

    def page_indptr(self, group: int) -> tuple[int, int]:
        """Return the start and end of the part of a group in the column `page_indptr`."""
        start = group * aligned(self.sizes.chunks + 1)
        return start, start + self.sizes.chunks + 1

    @property
    def num_decoding(self) -> int:
        """Number of tokens of decode rows."""
        return self.sizes.tokens - int(self.column("query_indptr")[-1]) if self.sizes.chunks else self.sizes.tokens

    @property
    def longest_chunk(self) -> int:
        return int(np.diff(self.column("query_indptr")).max())

    @property
    def num_sampling(self) -> int:
        return self.sizes.sampling if self.sizes.chunks else self.sizes.tokens


def plan_decoding(
    rows: StepRows,
    updates: Sequences[TableUpdate],
    padding: Padding,
    *,
    greedy: bool,
    memory: Allocate = pageable_memory,
) -> StepPlan:
    """Plan one token for each of `rows`, and its drafts, in order. `padding` must have room for all tokens and updates."""
    dummy = StepPlan.dummy(padding, greedy=greedy)
    plan = StepPlan(memory(len(dummy.numbers)), dummy.sizes, dummy.bounds, greedy)
    plan.numbers[:] = dummy.numbers
    _put_decoding(plan, rows, rows.others)
    _put_updates(plan, updates)
    return plan


def plan_chunks(
    rows: StepRows,
    updates: Sequences[TableUpdate],
    windows: Sequences[int | None] = (None,),
    *,
    greedy: bool,
    memory: Allocate = pageable_memory,
) -> StepPlan:
    """Plan one token for each decode row and its drafts, then the tokens of the chunks; `windows` are those of the groups."""
    decoding = [row for row in rows.others if not row.prefills]
    chunks = rows.others[len(decoding) :]
    first = rows.num_persistent + sum(row.length for row in decoding)
    ends = [row.start + row.length for row in chunks]
    tables = [
        row.sequence.tables[number][CacheGroup(0, window).first_block(row.start, BLOCK_SIZE) : -(-end // BLOCK_SIZE)]
        for number, window in enumerate(windows)
        for row, end in zip(chunks, ends, strict=True)
    ]
    chunk_tokens = sum(row.length for row in chunks)
    num_sampling = first + sum(row.samples for row in chunks)
    pages, groups = sum(map(len, tables)), len(windows)
    sizes = PlanSizes(first + chunk_tokens, num_sampling, len(updates), pages, len(chunks), groups)
    plan = StepPlan.blank(sizes, greedy=greedy, memory=memory)
    ids, positions, slots = plan.column("ids"), plan.column("positions"), plan.column("slots")
    ids[:first] = LAST_SAMPLED
    plan.column("behind")[:] = 0
    _put_decoding(plan, rows, decoding)
    sampling = list(range(first))
    at = first
    for row, end in zip(chunks, ends, strict=True):
        after = at + row.length
        ids[at:after] = row.sequence.tokens[row.start : end]
        positions[at:after] = np.arange(row.start, end, dtype=np.int32)
        slots[at:after] = row.sequence.slot
        if row.samples:
            sampling.append(after - 1)
        at = after
    plan.column("sampling")[:] = sampling
    _put_updates(plan, updates)
    plan.column("pages")[:] = [block for table in tables for block in table]
    plan.column("query_indptr")[:] = np.cumsum([0, *(row.length for row in chunks)])
    page_ends = np.cumsum([0, *map(len, tables)])
    for group in range(groups):
        start, end = plan.page_indptr(group)
        plan.column("page_indptr")[start:end] = page_ends[group * len(chunks) : (group + 1) * len(chunks) + 1]
    plan.column("last_pages")[:] = [(end - 1) % BLOCK_SIZE + 1 for end in ends]
    states = [(row.sequence.state_read, row.sequence.state_write, *row.checkpoint) for row in chunks]
    for name, numbers in zip(STATE_COLUMNS, zip(*states, strict=True), strict=True):
        plan.column(name)[:] = numbers
    return plan


def _put_decoding(plan: StepPlan, rows: StepRows, decoding: Sequences[StepRow]) -> None:
    """Write positions and slots of persistent rows and of other decode rows, and the tokens that the host knows."""
    positions, slots = plan.column("positions"), plan.column("slots")
    first = rows.num_persistent
    if rows.persistent is not None:
        positions[:first] = rows.persistent.starts
        slots[:first] = rows.persistent.slots
    if decoding:
        count = first + sum(row.length for row in decoding)
        if count > first + len(decoding):
            ids = [token for row in decoding for token in (_known_token(row), *row.drafts)]
            plan.column("ids")[first:count] = ids
            positions[first:count] = [at for row in decoding for at in range(row.start, row.start + row.length)]
            slots[first:count] = [slot for row in decoding for slot in repeat(row.sequence.slot, row.length)]
            behind = [number for row in decoding for number in repeat(row.sequence.state_behind, row.length)]
            plan.column("behind")[first:count] = behind
            return
        plan.column("ids")[first:count] = [_known_token(row) for row in decoding]
        positions[first:count] = [row.start for row in decoding]
        slots[first:count] = [row.sequence.slot for row in decoding]
        plan.column("behind")[first:count] = [row.sequence.state_behind for row in decoding]


def _known_token(row: StepRow) -> int:
    """Return the first token of a decode row: after drafts only the host knows which one is the last."""
    tokens = row.sequence.tokens
    return tokens[row.start] if row.start < len(tokens) else LAST_SAMPLED


def _put_updates(plan: StepPlan, updates: Sequences[TableUpdate]) -> None:
    if updates:
        plan.column("cells")[: len(updates)] = [cell for cell, _ in updates]
        plan.column("blocks")[: len(updates)] = [block for _, block in updates]


def table_updates(rows: StepRows, slots: int, max_blocks: int) -> list[TableUpdate]:
    """Return the updates of the block tables [groups, slots, max_blocks] that a step of `rows` needs, and mark them as sent."""
    updates: list[TableUpdate] = []
    # Of the persistent rows, only those marked as changed have new blocks.
    sequences = [row.sequence for row in rows.others]
    if rows.persistent is not None:
        sequences += [sequence for sequence in rows.persistent.changed if sequence.is_held]
    for sequence in sequences:
        row = sequence.slot
        for group, table in enumerate(sequence.tables):
            if (known := sequence.synced[group]) < len(table):
                # Blocks beyond the longest sequence are never read.
                updates.extend(enumerate(table[known:max_blocks], row * max_blocks + known))
                sequence.synced[group] = len(table)
            row += slots
    return updates
