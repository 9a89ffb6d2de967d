"""The distribution of the work of decode attention over programs, by the number of rows."""

from dataclasses import dataclass
from typing import Literal

import triton

FLOATS_PER_WARP = 2048
"""Results that a warp can hold in registers, and partial results that it merges at a time."""
FEWEST_SPLITS, MAX_SPLITS = 8, 64
"""A row that is much longer than the others is split even if the rows alone occupy the device."""
MOST_BLOCKS, PROGRAMS_PER_BLOCK = 64, 7
"""Short rows are not split then: the more rows and KV heads there are, the more blocks has a part. Measured on an H200 with rows of
576 tokens: two or three parts are best for 128 rows and heads, one for 256 and more."""
SECOND_KERNEL_PROGRAMS = 64
"""Rows times KV heads up to which a second kernel merges the partial results. Measured on an H200, 8 KV heads of 4 query heads,
head_dim 128, 600 tokens: second kernel 6.8 µs and last arrival 11.4 µs at one row, 14.1 and 18.8 at 8, but 15.0 and 13.4 at 12.
3 KV heads of 3 query heads, head_dim 64: 4.4 and 5.1 at one row, 10.5 and 13.9 at 20, but 8.4 and 6.9 at 24."""

Merge = Literal["second kernel", "last arrival"]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Work distribution of a launch."""

    splits: int
    """Programs per (row, KV head). Those that a short row does not need exit immediately."""
    min_blocks: int
    """Minimum number of blocks per program."""
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
    programs = rows * num_kv_heads
    results = group_rows(num_heads, num_kv_heads) * triton.next_power_of_2(head_dim)
    # A single warp needs no synchronization, but must hold all results in its registers.
    warps = min(max_warps, -(-results // FLOATS_PER_WARP))
    splits = triton.next_power_of_2(-(-8 * multiprocessors // programs))
    min_blocks = min(max(programs // PROGRAMS_PER_BLOCK, 2), MOST_BLOCKS)
    merge: Merge = "second kernel" if programs <= SECOND_KERNEL_PROGRAMS else "last arrival"
    # Latent rows are wide, so are their partial results.
    fewest, stages = (FEWEST_SPLITS, 3) if head_dim <= 256 else (FEWEST_SPLITS // 2, 2)
    return LaunchConfig(min(max(splits, fewest), MAX_SPLITS), min_blocks, warps, stages, merge)


def group_rows(num_heads: int, num_kv_heads: int) -> int:
    """Return the rows of the product of a KV head's queries and keys: at least the 16 of a matrix instruction."""
    rows: int = triton.next_power_of_2(num_heads // num_kv_heads)
    return max(16, rows)
