"""Tile sizes of kernels."""

from __future__ import annotations

from functools import cache

import triton

PROGRAMS_WANTED = 264
"""Least programs of a kernel that is bound by reading weights: two for each of an H200's 132 multiprocessors."""


@cache
def row_tile(columns: int, elements_per_thread: int) -> tuple[int, int]:
    """Return elements and warps per program that holds a row of `columns`; at least `elements_per_thread`, at most 32 warps."""
    block = triton.next_power_of_2(columns)
    return block, min(max(block // (32 * elements_per_thread), 1), 32)
