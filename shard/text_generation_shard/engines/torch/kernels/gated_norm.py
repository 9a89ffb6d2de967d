"""RMS norms of groups of columns with a gate: see `operands.GatedNorm`. A program has a token's groups of up to a thousand columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.activation import activated
from text_generation_shard.engines.torch.kernels.operands import GatedNorm
from text_generation_shard.engines.torch.kernels.pdl import after_previous, pdl
from text_generation_shard.engines.torch.kernels.rows import row_tile

_ELEMENTS_PER_THREAD = 8
_COLUMNS = 1024
"""Columns of a program, unless a group has more: a program for each group of 128 takes twice as long on an H200."""


def gated_norm(x: Tensor, gate: Tensor, norm: GatedNorm, out: Tensor | None = None) -> Tensor:
    """Return the normed and gated values of `x` [tokens, columns], computed in float32; in the dtype of `gate` or in `out`."""
    if out is None:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    groups, block = x.shape[1] // norm.width, triton.next_power_of_2(norm.width)
    each = min(max(_COLUMNS // block, 1), triton.next_power_of_2(groups))
    _, num_warps = row_tile(each * block, _ELEMENTS_PER_THREAD)
    _gated_norm_kernel[(len(x), triton.cdiv(groups, each))](
        x,
        gate,
        norm.weight,
        out,
        x.stride(0),
        gate.stride(0),
        out.stride(0),
        norm.eps,
        GATE_FIRST=norm.gate_first,
        GROUPS=groups,
        EACH=each,
        WIDTH=norm.width,
        BLOCK=block,
        num_warps=num_warps,
        **pdl(x),
    )
    return out


@triton.jit
def _gated_norm_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor | None,
    out: tl.tensor,
    x_stride: int,
    gate_stride: int,
    out_stride: int,
    eps: float,
    GATE_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    after_previous(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    groups, places = tl.program_id(1) * EACH + tl.arange(0, EACH)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (groups < GROUPS) & (places < WIDTH)
    columns = groups * WIDTH + places
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gates = activated(gates, "silu")
    if GATE_FIRST:
        values *= gates
    if weight is not None:
        scale = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / WIDTH + eps)
        values *= scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        values *= gates
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)
