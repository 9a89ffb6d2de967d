"""Tile sizes for kernels whose programs hold a whole row in registers."""

from __future__ import annotations

from functools import cache

import triton


@cache
def row_tile(columns: int, elements_per_thread: int) -> tuple[int, int]:
    """Return elements and warps per program for rows of `columns`; at least `elements_per_thread`, at most 32 warps."""
    block = triton.next_power_of_2(columns)
    return block, min(max(block // (32 * elements_per_thread), 1), 32)
