"""RMS norm of the residual stream (Zhang and Sennrich 2019, arXiv 1910.07467), optionally after an addition to it.

One program per row. The row stays in registers between the sum of squares and the scaling, so it is read once.
"""

import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.rows import row_tile

_ELEMENTS_PER_THREAD = 8


def rms_norm(  # noqa: PLR0913 – as flat as the kernel
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    update: Tensor | None = None,
    update_weight: Tensor | None = None,
    scale: float = 1.0,
    factor: float = 1.0,
) -> None:
    """out = residual · rsqrt(mean(residual²) + eps) · weight, computed in float32 and rounded once; out = residual without a `weight`.

    `residual` [tokens, hidden], `weight` [hidden], `out` [tokens, hidden] in any float dtype. With an `update` [tokens, hidden] in any
    float dtype, residual = (residual + scale · update) · factor comes first, in place, and `residual` is float32. With an
    `update_weight` [hidden], the update is normed before it is added.
    """
    tokens, hidden = residual.shape
    block, num_warps = row_tile(hidden, _ELEMENTS_PER_THREAD)
    _norm_kernel[(tokens,)](
        update,
        residual,
        update_weight,
        weight,
        out,
        0 if update is None else update.stride(0),
        residual.stride(0),
        out.stride(0),
        eps,
        factor,
        SCALE=scale,
        HAS_FACTOR=factor != 1.0,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=num_warps,
    )


@triton.jit
def _norm_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    update: tl.tensor | None,
    residual: tl.tensor,
    update_weight: tl.tensor | None,
    weight: tl.tensor | None,
    out: tl.tensor,
    update_stride: int,
    residual_stride: int,
    out_stride: int,
    eps: float,
    factor: float,
    SCALE: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    values = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if update is not None:
        added = tl.load(update + row * update_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if update_weight is not None:
            update_factors = tl.load(update_weight + columns, mask=inside, other=0.0).to(tl.float32)
            added *= norm_scale(added, eps, HIDDEN) * update_factors
        if SCALE != 1.0:
            added *= SCALE
        values += added
        if HAS_FACTOR:
            values *= factor
        tl.store(residual + row * residual_stride + columns, values, mask=inside)
    if weight is not None:
        values *= norm_scale(values, eps, HIDDEN) * factors
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_scale(values: tl.tensor, eps: tl.tensor, HIDDEN: tl.constexpr) -> tl.tensor:
    """Return rsqrt(mean(values²) + eps) of a row of HIDDEN float32 values, padded with zeros."""
    return tl.rsqrt(tl.sum(values * values) / HIDDEN + eps)
