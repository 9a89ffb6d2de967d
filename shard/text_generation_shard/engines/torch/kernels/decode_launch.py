"""The division of the work of decode attention over programs.

The number of programs follows from the number of rows, on the host; the keys of each from the lengths, on the device.
"""

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl

FLOATS_PER_WARP = 2048
"""Results that a warp can hold in registers, and partial results that it merges at a time."""
WARPS_AT_ONCE = 8
"""Warps of a multiprocessor: more of them have no place at the same time, with the keys and values that they load ahead. Measured on an
H200: 9 programs of a warp take 1.2 times as long as 8."""
MOST_PARTS = 64
"""Most programs for each row and KV head, unless multiprocessors would have none: partial results take time to merge."""
SECOND_KERNEL_HEADS = 64
"""KV heads of all rows up to which a second kernel merges the partial results. Measured on an H200, 8 KV heads of 4 query heads,
head_dim 128, 600 tokens: second kernel 5.4 µs and last arrival 7.0 µs at one row, 11.8 and 12.6 at 8, but 14.7 and 14.1 at 12.
3 KV heads of 3 query heads, head_dim 64: 4.4 and 4.6 at one row, but 8.0 and 7.6 at 20."""

_LEAST_BLOCKS = tl.constexpr(2)
"""Fewest blocks of a program: the merge of results of single blocks would take more time than it saves."""
_GROWTH_DIVISOR = tl.constexpr(4)
"""The share of a program may grow by a fourth, so that rows are cut at fewer places. Measured on an H200, 8 KV heads, rows of 512 to 640
tokens: with growth by a fourth 128 rows take 0.94 of the time without growth, and 256 rows 0.98; with an eighth 0.94 and 1.01."""

FEW_ROWS = 32
"""Rows up to which one kernel adds up the blocks of as many rows. So many that each kernel runs in a step of a size that is captured at
the start: no other step has to wait for a compiler."""

Merge = Literal["second kernel", "last arrival"]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Work distribution of a launch."""

    programs: int
    """Programs per KV head. Those without blocks exit immediately."""
    warps: int
    stages: int
    """Depth of the software pipeline: stages - 1 blocks are loading while one is processed."""
    merge: Merge
    """Merge of the partial results: by a second kernel, which merges the heads in parallel, or by the last program of the
    row, which saves a launch."""


def config_for(
    rows: int, num_heads: int, num_kv_heads: int, head_dim: int, multiprocessors: int, max_warps: int = 4
) -> LaunchConfig:
    """Return the launch configuration for a number of rows; it does not depend on lengths."""
    results = group_rows(num_heads, num_kv_heads) * triton.next_power_of_2(head_dim)
    # A single warp needs no synchronization, but must hold all results in its registers.
    warps = min(max_warps, -(-results // FLOATS_PER_WARP))
    programs = max(1, WARPS_AT_ONCE // warps) * multiprocessors // num_kv_heads
    programs = max(1, min(programs, max(MOST_PARTS * rows, multiprocessors // num_kv_heads)))
    merge: Merge = "second kernel" if rows * num_kv_heads <= SECOND_KERNEL_HEADS else "last arrival"
    return LaunchConfig(programs, warps, 3 if head_dim <= 256 else 2, merge)


def row_places(rows: int, max_rows: int) -> int:
    """Return the rows whose blocks a kernel adds up: there are a kernel for one row, one for a few, and one for up to `max_rows`."""
    if rows == 1:
        return 1
    return FEW_ROWS if rows <= FEW_ROWS else int(triton.next_power_of_2(max_rows))


def group_rows(num_heads: int, num_kv_heads: int) -> int:
    """Return the rows of the product of a KV head's queries and keys: at least the 16 of a matrix instruction."""
    rows: int = triton.next_power_of_2(num_heads // num_kv_heads)
    return max(16, rows)


@triton.jit
def divide(
    positions: tl.tensor,
    window: int,
    num_rows: int,
    programs: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the end of each row in the list of blocks, [ROWS], and the share of a program: the most blocks that it reads.

    The list has the visible blocks of all rows, at least one of each. A program that reads parts of two rows waits twice for their
    first blocks, and the parts of a row must be merged. So if a larger share suffices, rows are padded to a multiple of a part of the
    longest one, and a program reads one part, or several whole rows.

    Padding is shorter than a part, and the share a multiple of it, so each part of a row has a visible block.
    """
    row = tl.arange(0, ROWS)
    position = tl.load(positions + row, mask=row < num_rows, other=0)
    blocks = position // BLOCK + 1 - tl.maximum(position - window + 1, 0) // BLOCK
    blocks = tl.where(row < num_rows, blocks, 0)
    total = tl.sum(blocks, axis=0)
    share = tl.maximum(tl.cdiv(total, programs), _LEAST_BLOCKS)
    # One row shares no program with another.
    if ROWS > 1:
        longest, limit = tl.max(blocks, axis=0), share + share // _GROWTH_DIVISOR
        part = tl.maximum(tl.cdiv(longest, tl.maximum(longest * programs // total, 1)), _LEAST_BLOCKS)
        together = tl.maximum(limit // longest, 1)
        padded = tl.cdiv(blocks, part) * part
        fits = (together * part <= limit) & (tl.sum(padded, axis=0) <= programs * together * part)
        blocks, share = tl.where(fits, padded, blocks), tl.where(fits, together * part, share)
    return tl.cumsum(blocks, axis=0), share


@triton.jit
def blocks_of(ends: tl.tensor, row: tl.tensor, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return where a row begins and ends in the list of blocks, with its padding."""
    rows = tl.arange(0, ROWS)
    return tl.max(tl.where(rows < row, ends, 0), axis=0), tl.max(tl.where(rows <= row, ends, 0), axis=0)


@triton.jit
def parts_of(start: tl.tensor, stop: tl.tensor, share: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the first program of a row, and how many read a part of it: padding adds none.

    The line of a part among the partial results is its program plus its row. No two parts have the same: of the programs of two
    rows, only the last one of the first row may be the first one of the next.
    """
    first = start // share
    return first, (stop - 1) // share - first + 1
