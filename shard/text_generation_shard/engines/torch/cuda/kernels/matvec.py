"""Products of a weight with one to four rows: what a decode step of few streams consists of.

Such a product takes as long as its weight takes to be read, and each kernel beside it adds its start and its end. So the norm
before a product, the gated activation after it and the addition to the residual stream are done on the way.

A program owns some rows of the weight over all of K. It asks for them before it asks for x, so that the longest wait begins
first; it may even do so before the kernel that computes x has ended (see chaining.py). Each result is one program's sum in a fixed
order: the same inputs give the same bits.
"""

# ruff: noqa: N803 – constants of kernels are in capitals, as Triton has them
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.cuda.kernels.activation import activated
from text_generation_shard.engines.torch.cuda.kernels.chaining import can_chain, let_next_begin, wait_for_previous
from text_generation_shard.engines.torch.cuda.kernels.norm import norm_scale

MAX_ROWS = 4
"""Beyond, a product of matrices is the better tool."""

Order = Literal["free", "ahead", "chained"]

_ELEMENTS_PER_LOAD = 8
"""16 bytes of a 16-bit weight."""
_PROGRAMS_WANTED = 264
"""Two for each of an H200's 132 multiprocessors."""


@dataclass(frozen=True, slots=True)
class MatvecConfig:
    """How a product is cut: weight rows of a program (of gate and of up each, if there are both), and its warps."""

    block_n: int
    num_warps: int
    order: Order = "free"
    """How loads of the weight stand to those of x: as the compiler sees fit, saving registers; all before any of x; or, besides,
    before the kernel ahead in the stream has ended. So no kernel may write a weight while steps run."""


TUNED: dict[tuple[int, int, int], MatvecConfig] = {
    (1, 6144, 4096): MatvecConfig(8, 8, "chained"),
    (1, 4096, 4096): MatvecConfig(2, 8, "chained"),
    (1, 28672, 4096): MatvecConfig(2, 4, "chained"),
    (1, 4096, 14336): MatvecConfig(2, 16, "chained"),
    (1, 49152, 4096): MatvecConfig(2, 2, "chained"),
    # The same for one of two GPUs.
    (1, 3072, 4096): MatvecConfig(4, 8, "chained"),
    (1, 4096, 2048): MatvecConfig(8, 4, "chained"),
    (1, 4096, 7168): MatvecConfig(2, 8, "chained"),
}
"""By (rows, outputs, inputs): the best of -m text_generation_bench.kernels --sweep, where it is not what `config_for` derives."""


def config_for(rows: int, outputs: int, inputs: int, *, gated: bool = False) -> MatvecConfig:
    """The cut of weight[outputs, inputs] for `rows` rows of x; if `gated`, `outputs` counts gate rows and up rows."""
    if tuned := TUNED.get((rows, outputs, inputs)):
        return tuned
    # A thread reads up to four times from each of its weight rows, if sixteen warps are enough for that; and 16 times from all of
    # them together for one row of x, 8 times for more, whose sums want registers too.
    loads_of_a_row = max(triton.next_power_of_2(inputs) // (32 * _ELEMENTS_PER_LOAD), 1)
    num_warps = min(max(loads_of_a_row // 4, 1), 16)
    parts = 2 if gated else 1
    block_n = max((16 if rows == 1 else 8) * num_warps // loads_of_a_row // parts, 1)
    while block_n > 1 and outputs // parts < block_n * _PROGRAMS_WANTED:
        block_n //= 2
    return MatvecConfig(block_n, num_warps, "chained" if rows == 1 else "free")


def _order(config: MatvecConfig, weight: Tensor) -> Order:
    """The order asked for, where the device knows it."""
    if not weight.is_cuda:
        return "free"
    return config.order if config.order != "chained" or can_chain(weight) else "ahead"


def matvec(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = x · weightᵀ (+ bias), computed in float32 and rounded once to the type of `out`.

    `x` [rows, inputs] and `weight` [outputs, inputs] in one float dtype, `out` [rows, outputs] in any, `bias` [outputs]. At most
    MAX_ROWS rows, here and below. The weight is contiguous; x and out may be rows of something wider.
    """
    _launch(x, weight, out, bias)


def matvec_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> None:
    """residual += x · weightᵀ (+ bias), in place: `residual` float32 [rows, outputs], the rest as for `matvec`."""
    _launch(x, weight, residual, bias, add=True)


def norm_matvec(
    residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, out: Tensor, bias: Tensor | None = None
) -> None:
    """out = rms_norm(residual) · weightᵀ (+ bias), with the norm kept in float32; see norm.py for its formula.

    `residual` float32 [rows, inputs], `norm_weight` [inputs], the rest as for `matvec`.
    """
    _launch(residual, weight, out, bias, norm=(norm_weight, eps))


def norm_matvec_activate(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    kind: str,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """out = act(gate) · up of rms_norm(residual) · weightᵀ (+ bias), all in float32, rounded once.

    `weight` [2·inner, inputs] with the gate's rows first, as is `bias` [2·inner]; `out` [rows, inner] in any float dtype; `kind`
    as for `activate`; the rest as for `norm_matvec`.
    """
    rows, inputs = residual.shape
    inner = out.shape[1]
    config = config_for(rows, 2 * inner, inputs, gated=True)
    order = _order(config, weight)
    _gated_kernel[(triton.cdiv(inner, config.block_n),)](
        residual,
        norm_weight,
        weight,
        bias,
        out,
        residual.stride(0),
        out.stride(0),
        inner,
        eps,
        ROWS=rows,
        K=inputs,
        KIND=kind,
        ORDER=order,
        BLOCK_N=config.block_n,
        BLOCK_K=triton.next_power_of_2(inputs),
        num_warps=config.num_warps,
        launch_pdl=order == "chained",
    )


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor | None, float] = (None, 0.0),
    add: bool = False,
) -> None:
    outputs, inputs = weight.shape
    config = config_for(len(x), outputs, inputs)
    order = _order(config, weight)
    _matvec_kernel[(triton.cdiv(outputs, config.block_n),)](
        x,
        norm[0],
        weight,
        bias,
        out,
        x.stride(0),
        out.stride(0),
        outputs,
        norm[1],
        ROWS=len(x),
        K=inputs,
        ADD=add,
        ORDER=order,
        BLOCK_N=config.block_n,
        BLOCK_K=triton.next_power_of_2(inputs),
        num_warps=config.num_warps,
        launch_pdl=order == "chained",
    )


@triton.jit
def _matvec_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    norm_weight: tl.tensor | None,
    weight: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    x_stride: int,
    out_stride: int,
    outputs: int,
    eps: float,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    ADD: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    let_next_begin(ORDER == "chained")
    first = tl.program_id(0) * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    inside = columns < outputs
    tile = _weight_rows(weight, first, outputs, K, BLOCK_N, BLOCK_K)
    if norm_weight is not None:
        factors = _vector(norm_weight, K, BLOCK_K)
    _wait_for_x(ORDER)
    for row in tl.static_range(ROWS):
        targets = out + row * out_stride + columns
        addend = tl.zeros((BLOCK_N,), tl.float32)
        if ADD:
            addend += tl.load(targets, mask=inside, other=0.0)
        if bias is not None:
            addend += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        values = _vector(x + row * x_stride, K, BLOCK_K)
        if norm_weight is not None:
            # The scale waits for the whole row, so it comes last.
            sums = _times(tile, values * factors) * norm_scale(values, eps, K)
        else:
            sums = _times(tile, values)
        tl.store(targets, (sums + addend).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    x_stride: int,
    out_stride: int,
    inner: int,
    eps: float,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    let_next_begin(ORDER == "chained")
    first = tl.program_id(0) * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    inside = columns < inner
    gate_tile = _weight_rows(weight, first, inner, K, BLOCK_N, BLOCK_K)
    up_tile = _weight_rows(weight + tl.cast(inner, tl.int64) * K, first, inner, K, BLOCK_N, BLOCK_K)
    factors = _vector(norm_weight, K, BLOCK_K)
    _wait_for_x(ORDER)
    for row in tl.static_range(ROWS):
        values = _vector(x + row * x_stride, K, BLOCK_K)
        scale = norm_scale(values, eps, K)
        gate = _times(gate_tile, values * factors) * scale
        up = _times(up_tile, values * factors) * scale
        if bias is not None:
            gate += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(bias + inner + columns, mask=inside, other=0.0).to(tl.float32)
        gated = activated(gate, KIND) * up
        tl.store(out + row * out_stride + columns, gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _wait_for_x(ORDER: tl.constexpr) -> None:
    """What another kernel writes may be touched after this only. No load is moved across it."""
    wait_for_previous(ORDER == "chained")
    if ORDER == "ahead":
        tl.debug_barrier()


@triton.jit
def _weight_rows(
    weight: tl.tensor,
    first: tl.tensor,
    outputs: tl.tensor,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_N, BLOCK_K] of the weight, zero beyond K; beyond the last row, that one again. Read once, so not to be cached."""
    rows = tl.minimum(first + tl.arange(0, BLOCK_N), outputs - 1)
    inputs = tl.arange(0, BLOCK_K)
    places = weight + rows.to(tl.int64)[:, None] * K + inputs[None, :]  # a weight may have more than 2³¹ elements
    if K == BLOCK_K:
        return tl.load(places, eviction_policy="evict_first")
    return tl.load(places, mask=inputs[None, :] < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector(start: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """[BLOCK_K] in float32, zero beyond K."""
    inputs = tl.arange(0, BLOCK_K)
    return tl.load(start + inputs, mask=inputs < K, other=0.0).to(tl.float32)


@triton.jit
def _times(tile: tl.tensor, vector: tl.tensor) -> tl.tensor:
    """tile [BLOCK_N, BLOCK_K] · vector [BLOCK_K], in float32."""
    return tl.sum(tile.to(tl.float32) * vector[None, :], axis=1)
