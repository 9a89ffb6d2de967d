"""Writes updates to the block tables."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def update_tables(cells: Tensor, blocks: Tensor, tables: Tensor) -> None:
    """tables.flatten()[cells] = blocks, all int32; a repeated cell has the same block each time."""
    count = cells.shape[0]
    _update[(triton.cdiv(count, BLOCK),)](cells, blocks, tables, count, BLOCK=BLOCK)


@triton.jit
def _update(cells, blocks, tables, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    indices = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = indices < count
    tl.store(tables + tl.load(cells + indices, mask, 0), tl.load(blocks + indices, mask, 0), mask)
