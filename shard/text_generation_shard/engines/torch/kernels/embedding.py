"""The token embedding: writes each token's row of the embedding table to the residual stream."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Columns per program: eight per thread, with four warps."""


def embed(ids: Tensor, slots: Tensor, last_tokens: Tensor, table: Tensor, residual: Tensor, scale: float = 1.0) -> None:
    """residual[t] = scale · float(table[id]), with id = ids[t], or last_tokens[slots[t]] if ids[t] is negative.

    `ids` and `slots` int32 [tokens], `last_tokens` int32 [slots], `table` [vocabulary, hidden] in any float dtype,
    `residual` float32 [tokens, hidden]. The ids are not checked against the table.
    """
    tokens, hidden = residual.shape
    _embed_kernel[(tokens, triton.cdiv(hidden, _BLOCK))](
        ids,
        slots,
        last_tokens,
        table,
        residual,
        table.stride(0),
        residual.stride(0),
        SCALE=scale,
        HIDDEN=hidden,
        BLOCK=_BLOCK,
        num_warps=4,
    )


# Read one number at a time, at any offset of a buffer: the same compiled kernel serves aligned and unaligned pointers.
@triton.jit(do_not_specialize_on_alignment=["ids", "slots", "last_tokens"])
def _embed_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    ids: tl.tensor,
    slots: tl.tensor,
    last_tokens: tl.tensor,
    table: tl.tensor,
    residual: tl.tensor,
    table_stride: int,
    residual_stride: int,
    SCALE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    known = tl.load(ids + token)
    if known < 0:
        known = tl.load(last_tokens + tl.load(slots + token))
    row = table + known.to(tl.int64) * table_stride  # a table may have more than 2³¹ elements
    values = tl.load(row + columns, mask=inside).to(tl.float32)
    if SCALE != 1.0:
        values *= SCALE
    tl.store(residual + token * residual_stride + columns, values, mask=inside)
