"""Kernels in which a program has a whole row in its registers."""

from __future__ import annotations

from functools import cache

import triton


@cache
def row_tile(columns: int, elements_per_thread: int) -> tuple[int, int]:
    """Elements and warps of a program for rows of `columns`, of which a thread has at least so many; 32 warps at most."""
    block = triton.next_power_of_2(columns)
    return block, min(max(block // (32 * elements_per_thread), 1), 32)
