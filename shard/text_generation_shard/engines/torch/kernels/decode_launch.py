"""The distribution of the work of decode attention over programs, by the number of rows."""

from dataclasses import dataclass
from typing import Literal

import triton

FLOATS_PER_WARP = 2048
"""Results that a warp can hold in registers, and partial results that it merges at a time."""
WARPS_AT_ONCE = 8
"""Warps of a multiprocessor: more of them have no place at the same time, with the keys and values that they load ahead. Measured on an
H200: 9 programs of a warp take 1.2 times as long as 8."""
MOST_PARTS = 64
"""Most programs for each row and KV head, unless multiprocessors would have none: partial results take time to merge."""
SECOND_KERNEL_HEADS = 64
"""KV heads of all rows up to which a second kernel merges the partial results. Measured on an H200, 8 KV heads of 4 query heads,
head_dim 128, 600 tokens: second kernel 6.8 µs and last arrival 11.4 µs at one row, 14.1 and 18.8 at 8, but 15.0 and 13.4 at 12.
3 KV heads of 3 query heads, head_dim 64: 4.4 and 5.1 at one row, 10.5 and 13.9 at 20, but 8.4 and 6.9 at 24."""

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
