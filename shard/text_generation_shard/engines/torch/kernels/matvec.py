"""Products of a weight with one to four rows, for decode steps with few sequences.

Such a product takes as long as reading its weight, and every kernel next to it adds its start and end. So the norm before a
product, the gated activation after it and the addition to the residual stream are fused into it.

A program owns some rows of the weight over all of K. It loads them before x, so that the longest wait starts first; with
programmatic dependent launch, even before the kernel that computes x has ended (see pdl.py). Each result is the sum of one
program in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.activation import gated
from text_generation_shard.engines.torch.kernels.norm import norm_scale
from text_generation_shard.engines.torch.kernels.operands import ChosenExperts, GatedActivation, fused_arguments
from text_generation_shard.engines.torch.kernels.packed_matvec import packed_matvec
from text_generation_shard.engines.torch.kernels.packed_weight import Fp8Weight, MatvecWeight, PackedWeight
from text_generation_shard.engines.torch.kernels.pdl import launch_dependents, supports_pdl, wait_for_previous
from text_generation_shard.engines.torch.kernels.rows import PROGRAMS_WANTED

MAX_ROWS = 4
"""Above this, a matrix product is faster."""

Order = Literal["free", "ahead", "pdl"]

_BYTES_PER_LOAD = 16


@dataclass(frozen=True, slots=True)
class MatvecConfig:
    """Tiling of a product: weight rows per program (of gate and of up each, if gated), and warps per program."""

    block_n: int
    num_warps: int
    order: Order = "free"
    """Order of the loads of weight and x. "free": chosen by the compiler, which saves registers. "ahead": all of the weight
    before any of x. "pdl": also before the previous kernel has ended, so no kernel may write weights while steps run."""


TUNED: dict[tuple[int, int, int], MatvecConfig] = {
    (1, 6144, 4096): MatvecConfig(8, 8, "pdl"),
    (1, 4096, 4096): MatvecConfig(2, 8, "pdl"),
    (1, 28672, 4096): MatvecConfig(2, 4, "pdl"),
    (1, 4096, 14336): MatvecConfig(2, 16, "pdl"),
    (1, 49152, 4096): MatvecConfig(2, 2, "pdl"),
    # The same for one of two ranks.
    (1, 3072, 4096): MatvecConfig(4, 8, "pdl"),
    (1, 4096, 2048): MatvecConfig(8, 4, "pdl"),
    (1, 4096, 7168): MatvecConfig(2, 8, "pdl"),
}
"""By (rows, outputs, inputs), for weights of 16 bits: the best of -m text_generation_bench.kernels --sweep, where `config_for` derives
another one."""


def config_for(rows: int, outputs: int, inputs: int, *, gated: bool = False, itemsize: int = 2) -> MatvecConfig:
    """Return the tiling of weight[outputs, inputs] for `rows` rows of x; if `gated`, `outputs` counts gate and up rows."""
    if itemsize == 2 and (tuned := TUNED.get((rows, outputs, inputs))):
        return tuned
    # Up to sixteen warps, so that a thread loads at most four times from each weight row; in total 16 loads per thread for one
    # row of x, 8 for more rows, whose sums need registers too.
    loads_of_a_row = max(triton.next_power_of_2(inputs) * itemsize // (32 * _BYTES_PER_LOAD), 1)
    num_warps = min(max(loads_of_a_row // 4, 1), 16)
    parts = 2 if gated else 1
    block_n = max((16 if rows == 1 else 8) * num_warps // loads_of_a_row // parts, 1)
    while block_n > 1 and outputs // parts < block_n * PROGRAMS_WANTED:
        block_n //= 2
    return MatvecConfig(block_n, num_warps, "pdl" if rows == 1 else "free")


def _order(config: MatvecConfig, weight: Tensor) -> Order:
    """Return the order of the config, or the best one that the device supports."""
    if not weight.is_cuda:
        return "free"
    return config.order if config.order != "pdl" or supports_pdl(weight) else "ahead"


def matvec(  # noqa: PLR0913 – the options of one kernel
    x: Tensor,
    weight: MatvecWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor | None, float] = (None, 0.0),
    activation: GatedActivation | None = None,
    add: bool = False,
    scale: float = 1.0,
    experts: ChosenExperts | None = None,
    normed: Tensor | None = None,
) -> None:
    """out = scale · (x · weightᵀ (+ bias)), or out += that if `add`; computed in float32 and rounded once to the dtype of `out`.

    `x` [rows, inputs] and `weight` [outputs, inputs] in one float dtype, `out` [rows, outputs] in any, `bias` [outputs]; at most
    MAX_ROWS rows. The weight is contiguous, in FP8 or packed; x and out may be slices of wider tensors. With a `norm` (weight
    [inputs] and eps), x is float32 and normed first, see norm.py; the result is kept in float32, and rounded to `normed` [rows,
    inputs], if given, unless the weight is packed. With an `activation`, half of the weight's rows are gates, and out
    [rows, outputs / 2] = act(gate) · up, without `add` and `scale`. With `experts`, weight and bias are those of all
    experts one after the other, and `out` has a row for each pair of a token and an expert; any number of pairs.
    """
    if isinstance(weight, PackedWeight):
        packed_matvec(x, weight, out, bias, norm=norm, activation=activation, add=add, scale=scale, experts=experts)
        return
    weight, scales = (weight.values, weight.scales) if isinstance(weight, Fp8Weight) else (weight, None)
    (outputs, inputs), columns = weight.shape, out.shape[1]
    if experts is not None:
        assert scales is None, "no expert has scales by row"
        outputs //= experts.count
    pairs = 1 if experts is None else len(out)
    config = config_for(
        1 if experts else len(x), outputs * pairs, inputs, gated=activation is not None, itemsize=weight.itemsize
    )
    order = _order(config, weight)
    _matvec_kernel[(triton.cdiv(columns, config.block_n), pairs)](
        x,
        norm[0],
        weight,
        scales,
        bias,
        out,
        None if experts is None else experts.ids,
        normed,
        x.stride(0),
        out.stride(0),
        columns,
        norm[1],
        ROWS=1 if experts else len(x),
        K=inputs,
        ADD=add,
        SCALE=scale,
        ORDER=order,
        BLOCK_N=config.block_n,
        BLOCK_K=triton.next_power_of_2(inputs),
        num_warps=config.num_warps,
        launch_pdl=order == "pdl",
        **fused_arguments(activation, experts),
    )


@triton.jit
def _matvec_kernel(  # noqa: PLR0913, PLR0915, C901 – a kernel's arguments are flat
    x: tl.tensor,
    norm_weight: tl.tensor | None,
    weight: tl.tensor,
    scales: tl.tensor | None,
    bias: tl.tensor | None,
    out: tl.tensor,
    ids: tl.tensor | None,
    normed: tl.tensor | None,
    x_stride: int,
    out_stride: int,
    outputs: int,
    eps: float,
    alpha: float,
    limit: float,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    EXPERTS_EACH: tl.constexpr,
    IDS_KNOWN: tl.constexpr,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    if not IDS_KNOWN:
        # The weight to read is known only after the previous kernels. The next one may read the choice when it starts.
        _wait_for_x(ORDER)
    launch_dependents(ORDER == "pdl")
    first = tl.program_id(0) * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    inside = columns < outputs
    PARTS: tl.constexpr = 1 if KIND is None else 2  # noqa: N806 – constants of the kernel
    STEP: tl.constexpr = 2 if INTERLEAVED else 1  # noqa: N806
    up_distance = 1 if INTERLEAVED else outputs
    if ids is not None:
        pair = tl.program_id(1)
        expert = tl.load(ids + pair).to(tl.int64)
        weight += expert * PARTS * outputs * K
        x += pair // EXPERTS_EACH * x_stride
        out += pair * out_stride
        if bias is not None:
            bias += expert * PARTS * outputs
    # Of the gates, if there are any.
    tile = _weight_rows(weight, first, outputs, STEP, K, BLOCK_N, BLOCK_K)
    if KIND is not None:
        up_tile = _weight_rows(weight + tl.cast(up_distance, tl.int64) * K, first, outputs, STEP, K, BLOCK_N, BLOCK_K)
    if norm_weight is not None:
        factors = _vector(norm_weight, K, BLOCK_K)
    if IDS_KNOWN:
        _wait_for_x(ORDER)
    for row in tl.static_range(ROWS):
        targets = out + row * out_stride + columns
        addend = tl.zeros((BLOCK_N,), tl.float32)
        if ADD:
            addend += tl.load(targets, mask=inside, other=0.0)
        if bias is not None:
            addend += tl.load(bias + columns * STEP, mask=inside, other=0.0).to(tl.float32) * SCALE
        values = _vector(x + row * x_stride, K, BLOCK_K)
        if norm_weight is not None:
            scale = norm_scale(values, eps, K)
            values *= factors
            if normed is not None:
                inputs = tl.arange(0, BLOCK_K)
                is_own = (inputs < K) & (tl.program_id(0) == 0)
                tl.store(normed + row * K + inputs, (values * scale).to(normed.dtype.element_ty), mask=is_own)
        sums = _times(tile, values)
        if norm_weight is not None:
            sums *= scale  # it depends on the whole row, so it is applied last
        if scales is not None:
            sums *= tl.load(scales + columns * STEP, mask=inside, other=0.0)
        if SCALE != 1.0:
            sums *= SCALE
        sums += addend
        if KIND is not None:
            up = _times(up_tile, values)
            if norm_weight is not None:
                up *= scale
            if scales is not None:
                up *= tl.load(scales + up_distance + columns * STEP, mask=inside, other=0.0)
            if bias is not None:
                up += tl.load(bias + up_distance + columns * STEP, mask=inside, other=0.0).to(tl.float32)
            sums = gated(sums, up, alpha, limit, KIND)
        tl.store(targets, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _wait_for_x(ORDER: tl.constexpr) -> None:
    """Wait until x may be read. No load is moved across it."""
    wait_for_previous(ORDER == "pdl")
    if ORDER == "ahead":
        tl.debug_barrier()


@triton.jit
def _weight_rows(
    weight: tl.tensor,
    first: tl.tensor,
    outputs: tl.tensor,
    STEP: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Load every STEP-th row of the weight: [BLOCK_N, BLOCK_K], zero beyond K; rows beyond the last repeat it.

    Not cached: it is read once.
    """
    rows = tl.minimum(first + tl.arange(0, BLOCK_N), outputs - 1) * STEP
    inputs = tl.arange(0, BLOCK_K)
    pointers = weight + rows.to(tl.int64)[:, None] * K + inputs[None, :]  # a weight may have more than 2³¹ elements
    if K == BLOCK_K:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=inputs[None, :] < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector(start: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """Load [BLOCK_K] as float32, zero beyond K."""
    inputs = tl.arange(0, BLOCK_K)
    return tl.load(start + inputs, mask=inputs < K, other=0.0).to(tl.float32)


@triton.jit
def _times(tile: tl.tensor, vector: tl.tensor) -> tl.tensor:
    """Return tile [BLOCK_N, BLOCK_K] · vector [BLOCK_K], in float32."""
    return tl.sum(tile.to(tl.float32) * vector[None, :], axis=1)
