"""Groups the pairs (token, expert) of a mixture of experts by expert, for products in blocks of rows with one expert each.

A stable counting sort: programs count the experts of their pairs, then each program finds the places of its own pairs. Nothing
waits for the host, and nothing depends on the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 256
"""Pairs per program."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """The rows of a grouped product: the pairs in order of their experts, and blocks of rows that do not mix experts."""

    order: Tensor
    """int32 [pairs]: the pair of each row; pair p is the (p mod k)-th expert of token p div k."""
    rows: Tensor
    """int32 [pairs]: the row of each pair."""
    offsets: Tensor
    """int32 [experts + 1]: the first row of each expert, and the end of the last one's rows."""
    block_experts: Tensor
    """int32 [max_blocks]: the expert of each block; undefined from `num_blocks` on."""
    block_starts: Tensor
    """int32 [max_blocks]: the first row of each block; it ends `block_rows` later, or at its expert's end."""
    num_blocks: Tensor
    """int32 [1]."""
    block_rows: int

    @property
    def ends(self) -> Tensor:
        """int32 [experts]: the end of each expert's rows."""
        return self.offsets[1:]

    @property
    def max_blocks(self) -> int:
        return self.block_experts.shape[0]


def group_by_expert(ids: Tensor, experts: int, block_rows: int) -> ExpertGroups:
    """Group the pairs of `ids` [tokens, k], contiguous integers below `experts`."""
    pairs = ids.numel()
    max_blocks = min(pairs, pairs // block_rows + min(pairs, experts))
    programs, bins = triton.cdiv(pairs, _PAIRS), triton.next_power_of_2(experts)
    sizes = [pairs, pairs, experts + 1, max_blocks, max_blocks, 1, programs * bins]
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=ids.device)
    order, rows, offsets, block_experts, block_starts, num_blocks, counts = torch.split(memory, sizes)
    if programs > 1:
        _count_kernel[(programs,)](ids, counts, pairs, BINS=bins, PAIRS=_PAIRS, num_warps=4)
    _place_kernel[(programs,)](
        ids,
        counts,
        order,
        rows,
        offsets,
        block_experts,
        block_starts,
        num_blocks,
        pairs,
        programs,
        EXPERTS=experts,
        BINS=bins,
        PAIRS=_PAIRS,
        BLOCK_ROWS=block_rows,
        COUNTED=programs > 1,
        COMPARED=16,
        num_warps=8,
    )
    return ExpertGroups(order, rows, offsets, block_experts, block_starts, num_blocks, block_rows)


@triton.jit
def _count_kernel(ids: tl.tensor, counts: tl.tensor, pairs: int, BINS: tl.constexpr, PAIRS: tl.constexpr) -> None:
    program = tl.program_id(0)
    own = program * PAIRS + tl.arange(0, PAIRS)
    inside = own < pairs
    experts = tl.load(ids + own, mask=inside, other=0).to(tl.int32)
    tl.store(counts + program * BINS + tl.arange(0, BINS), tl.histogram(experts, BINS, mask=inside))


@triton.jit
def _place_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    ids: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    rows: tl.tensor,
    offsets: tl.tensor,
    block_experts: tl.tensor,
    block_starts: tl.tensor,
    num_blocks: tl.tensor,
    pairs: int,
    programs: int,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
    COMPARED: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    bins, at = tl.arange(0, BINS), tl.arange(0, PAIRS)
    own = program * PAIRS + at
    inside = own < pairs
    experts = tl.load(ids + own, mask=inside, other=0).to(tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    if COUNTED:
        total = tl.zeros((BINS,), tl.int32)
        for other in range(programs):
            found = tl.load(counts + other * BINS + bins)
            total += found
            before += tl.where(other < program, found, 0)
    else:
        total = tl.histogram(experts, BINS, mask=inside)
    starts = tl.cumsum(total, 0) - total
    # A pair comes after those with the same expert in earlier programs, then in this one.
    places = tl.gather(starts + before, experts, 0)
    for first in range(0, PAIRS, COMPARED):
        number = first + tl.arange(0, COMPARED)
        compared = tl.load(ids + program * PAIRS + number, mask=program * PAIRS + number < pairs, other=-1).to(tl.int32)
        is_before = (compared[None, :] == experts[:, None]) & (number[None, :] < at[:, None])
        places += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(order + places, own, mask=inside)
    tl.store(rows + own, places, mask=inside)
    blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
    block_ends = tl.cumsum(blocks, 0)
    if program == 0:
        tl.store(offsets, 0)
        tl.store(offsets + 1 + bins, starts + total, mask=bins < EXPERTS)
        tl.store(num_blocks, tl.sum(blocks, axis=0))
    for block in range(program, tl.max(blocks, axis=0), programs):
        exists = block < blocks
        tl.store(block_experts + block_ends - blocks + block, bins, mask=exists)
        tl.store(block_starts + block_ends - blocks + block, starts + block * BLOCK_ROWS, mask=exists)
