"""The kernels around the products of a mixture of experts: gather and weighted sum; see activation.py for that between them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.expert_groups import ExpertGroups
from text_generation_shard.engines.torch.kernels.pdl import after_previous, pdl

_COLUMNS = 1024
"""Columns per program."""
_FEW_TOKENS, _FEW_COLUMNS = 16, 256
"""Columns per program of sums for at most so many tokens: with more programs a sum over ten experts takes 1.5 µs less on an H200."""


def gathered(x: Tensor, groups: ExpertGroups, each: int) -> Tensor:
    """Return the row of `x` [tokens, hidden] of each row of the groups; a token has `each` experts."""
    rows, hidden = groups.order.shape[0], x.shape[1]
    out = x.new_empty(rows, hidden)
    grid = (rows, triton.cdiv(hidden, _COLUMNS))
    _gather_kernel[grid](
        x, groups.order, out, x.stride(0), HIDDEN=hidden, EXPERTS_EACH=each, COLUMNS=_COLUMNS, num_warps=4, **pdl(x)
    )
    return out


def weighted_sum(  # noqa: PLR0913 – the options of one kernel
    results: Tensor,
    rows: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
    *,
    add: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Return scale · Σ weight · (result + bias of the expert) over each token's experts, in the order of `ids`: [tokens, hidden].

    `results` [pairs, hidden], `ids` and `weights` [tokens, k], `bias` [experts, hidden]. `rows` int32 [pairs] has the row of each pair
    in `results`; None: they are in order. With `out` in any float dtype, the sum is written to it, or added to it if `add`.
    """
    (tokens, each), hidden = ids.shape, results.shape[1]
    if out is None:
        out = results.new_empty(tokens, hidden)
    columns = _FEW_COLUMNS if tokens <= _FEW_TOKENS else _COLUMNS
    _sum_kernel[(tokens, triton.cdiv(hidden, columns))](
        results,
        rows,
        ids,
        weights,
        bias,
        out,
        out.stride(0),
        scale,
        HIDDEN=hidden,
        EXPERTS_EACH=each,
        ADD=add,
        COLUMNS=columns,
        num_warps=4,
        **pdl(results),
    )
    return out


@triton.jit
def _gather_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    HIDDEN: tl.constexpr,
    EXPERTS_EACH: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    after_previous(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    token = (tl.load(order + row) // EXPERTS_EACH).to(tl.int64)
    values = tl.load(x + token * x_stride + columns, mask=inside, other=0.0)
    tl.store(out + row * HIDDEN + columns, values, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _sum_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    results: tl.tensor,
    rows: tl.tensor | None,
    ids: tl.tensor,
    weights: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    out_stride: int,
    scale: float,
    HIDDEN: tl.constexpr,
    EXPERTS_EACH: tl.constexpr,
    ADD: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    after_previous(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    total = tl.zeros((COLUMNS,), tl.float32)
    for number in tl.static_range(EXPERTS_EACH):
        pair = token * EXPERTS_EACH + number
        row = pair
        if rows is not None:
            row = tl.load(rows + pair).to(tl.int64)
        result = tl.load(results + row * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            expert = tl.load(ids + pair).to(tl.int64)
            result += tl.load(bias + expert * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * result
    targets = out + token * out_stride + columns
    total *= scale
    if ADD:
        total += tl.load(targets, mask=inside, other=0.0)
    tl.store(targets, total.to(out.dtype.element_ty), mask=inside)
