"""Tile sizes of kernels."""

from functools import cache

import torch
import triton
from torch import Tensor

PROGRAMS_WANTED = 264
"""Least programs of a kernel that is bound by reading weights: two for each of an H200's 132 multiprocessors."""

HOPPER = 9
"""The major compute capability of the devices that kernels were measured on."""


def is_on_hopper(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == HOPPER


@cache
def row_tile(columns: int, elements_per_thread: int) -> tuple[int, int]:
    """Return elements and warps per program that holds a row of `columns`; at least `elements_per_thread`, at most 32 warps."""
    block = triton.next_power_of_2(columns)
    return block, min(max(block // (32 * elements_per_thread), 1), 32)
