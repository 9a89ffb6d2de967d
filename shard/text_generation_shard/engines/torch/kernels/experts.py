"""The grouped product of a mixture of experts: see ops/experts.py for the formula.

Two products over the pairs (token, expert), grouped by expert: the first gathers the rows of x and applies the gated activation,
the second multiplies by the weights of the pairs. A third kernel adds the results of each token in the order of its experts. So
the same inputs give the same bits, and nothing waits for the host.
"""

# ruff: noqa: N803 – kernel constants are in capitals, as usual in Triton
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.activation import activated
from text_generation_shard.engines.torch.kernels.expert_groups import ExpertGroups, group_by_expert
from text_generation_shard.engines.torch.ops.activation import GatedActivation
from text_generation_shard.engines.torch.ops.experts import Activation, ExpertLinear

_PROGRAMS_WANTED = 264
"""Two for each of an H200's 132 multiprocessors."""
_SUM_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """Tiles of a grouped product: rows, columns (of gate and of up each, if gated) and inputs at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 1
    """Blocks of rows whose programs run next to each other, for each tile of columns: they find its weights in the L2 cache."""


def block_rows(pairs: int, experts: int, dtype: torch.dtype) -> int:
    """Return the rows of a block: about those of an average expert, in the range of tensor cores, which float32 does not use."""
    most = 32 if dtype == torch.float32 else 128
    average: int = triton.next_power_of_2(triton.cdiv(pairs, experts))
    return min(max(average, 16), most)


TUNED: dict[tuple[int, int, int], ExpertTiling] = {}
"""By columns (of gate and up once), inputs, and pairs rounded up to a power of two: the best of
-m text_generation_bench.kernels --only experts --sweep, where `tiling_for` derives another one."""


def tiling_for(groups: ExpertGroups, columns: int, inputs: int, dtype: torch.dtype) -> ExpertTiling:
    """Return the tiling of a product; `columns` counts those of gate and up once."""
    rows = groups.block_rows
    if tuned := TUNED.get((columns, inputs, triton.next_power_of_2(groups.order.shape[0]))):
        return replace(tuned, block_m=rows)
    if rows == 128:
        return ExpertTiling(128, 128, 64, num_warps=8, num_stages=3, group=16)
    if rows == 64:
        return ExpertTiling(64, 64, 64, num_warps=4, num_stages=4, group=8)
    # Bound by reading the weights: enough programs for all multiprocessors.
    block_n = 32 if dtype == torch.float32 else 64
    while block_n > 16 and groups.max_blocks * triton.cdiv(columns, block_n) < _PROGRAMS_WANTED:
        block_n //= 2
    return ExpertTiling(rows, block_n, 32 if dtype == torch.float32 else 64, num_warps=4, num_stages=4)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertLinear, down: ExpertLinear, activation: Activation
) -> Tensor:
    """Return the weighted sum over the k experts of each token, [tokens, hidden], in the dtype of `x` [tokens, hidden].

    `ids` (an integer type) and `weights` (float32) are [tokens, k], contiguous. Products are summed in float32; the results of the
    gated activation and of each expert are rounded to the dtype of x.
    """
    tokens, k = ids.shape
    num_experts, outputs, _ = gate_up.weight.shape
    hidden = down.weight.shape[1]
    groups = group_by_expert(ids, num_experts, block_rows(ids.numel(), num_experts, gate_up.weight.dtype))
    gated = activation if isinstance(activation, GatedActivation) else None
    inner = x.new_empty(tokens * k, outputs // 2 if gated else outputs)
    _launch(x, gate_up, groups, inner, experts_each=k, activation=gated)
    if gated is None:
        inner = activation(inner)
    results = x.new_empty(tokens * k, hidden)
    _launch(inner, down, groups, results, pair_weights=weights)
    out = x.new_empty(tokens, hidden)
    grid = (tokens, triton.cdiv(hidden, _SUM_COLUMNS))
    _sum_kernel[grid](results, out, HIDDEN=hidden, EXPERTS_EACH=k, COLUMNS=_SUM_COLUMNS, num_warps=4)
    return out


def _launch(
    x: Tensor,
    linear: ExpertLinear,
    groups: ExpertGroups,
    out: Tensor,
    *,
    experts_each: int = 0,
    activation: GatedActivation | None = None,
    pair_weights: Tensor | None = None,
) -> None:
    """Compute one product. Rows of x are those of the groups or, with `experts_each`, tokens; rows of `out` likewise those of the
    groups or, with `pair_weights`, pairs."""
    weight, bias = linear.weight, linear.bias
    columns = out.shape[1]
    inputs = weight.shape[2]
    tiling = tiling_for(groups, columns, inputs, weight.dtype)
    # Rows of gate (or of all outputs), and the distance to the row of up.
    step, up = (1, 0) if activation is None else (2, 1) if activation.interleaved else (1, columns)
    bias_strides = (0, 0) if bias is None else bias.stride()
    _product_kernel[(groups.max_blocks * triton.cdiv(columns, tiling.block_n),)](
        x,
        weight,
        bias,
        out,
        groups.order,
        groups.ends,
        groups.block_experts,
        groups.block_starts,
        groups.num_blocks,
        pair_weights,
        x.stride(0),
        weight.stride(0),
        step * weight.stride(1),
        weight.stride(2),
        up * weight.stride(1),
        bias_strides[0],
        step * bias_strides[1],
        up * bias_strides[1],
        out.stride(0),
        groups.max_blocks,
        1.0 if activation is None else activation.alpha,
        1.0 if activation is None else activation.limit,
        INPUTS=inputs,
        COLUMNS=columns,
        EXPERTS_EACH=experts_each,
        KIND="" if activation is None else activation.kind,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        GROUP=tiling.group,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit
def _product_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    block_experts: tl.tensor,
    block_starts: tl.tensor,
    num_blocks: tl.tensor,
    pair_weights: tl.tensor | None,
    x_stride: int,
    expert_stride: int,
    column_stride: int,
    input_stride: int,
    up_distance: int,
    bias_expert_stride: int,
    bias_column_stride: int,
    bias_up_distance: int,
    out_stride: int,
    max_blocks: int,
    alpha: float,
    limit: float,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS_EACH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    block, tile = _block_and_tile(tl.program_id(0), max_blocks, tl.cdiv(COLUMNS, BLOCK_N), GROUP)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_experts + block)
    rows = tl.load(block_starts + block) + tl.arange(0, BLOCK_M)
    is_row = rows < tl.load(ends + expert)
    pairs = tl.load(order + rows, mask=is_row, other=0)
    sources = pairs // EXPERTS_EACH if EXPERTS_EACH else rows
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < COLUMNS
    inputs = tl.arange(0, BLOCK_K)
    x_at = x + sources.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    # An expert's weight has less than 2³¹ elements, those of all experts may have more.
    weight += expert.to(tl.int64) * expert_stride
    gate_at = weight + inputs[:, None] * input_stride + columns[None, :] * column_stride
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        is_input = start + inputs < INPUTS
        some = tl.load(x_at, mask=is_row[:, None] & is_input[None, :], other=0.0).to(weight.dtype.element_ty)
        is_weight = is_input[:, None] & is_column[None, :]
        gate = tl.dot(some, tl.load(gate_at, mask=is_weight, other=0.0), gate, input_precision="ieee")
        if KIND != "":
            up = tl.dot(some, tl.load(gate_at + up_distance, mask=is_weight, other=0.0), up, input_precision="ieee")
        x_at += BLOCK_K
        gate_at += BLOCK_K * input_stride
    if bias is not None:
        bias_at = bias + expert * bias_expert_stride + columns * bias_column_stride
        gate += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if KIND != "":
            up += tl.load(bias_at + bias_up_distance, mask=is_column, other=0.0).to(tl.float32)[None, :]
    targets = rows
    if KIND == "clamped_swiglu":
        gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
        gate = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    elif KIND != "":
        gate = activated(gate, KIND) * up
    if pair_weights is not None:
        targets = pairs
        gate *= tl.load(pair_weights + pairs, mask=is_row, other=0.0)[:, None]
    out_at = out + targets.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out_at, gate.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _block_and_tile(
    program: tl.tensor, max_blocks: tl.tensor, tiles: tl.constexpr, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the block of rows and the tile of columns of a program: GROUP blocks of the first tile, then of the next."""
    first = program // (GROUP * tiles) * GROUP
    height = tl.minimum(max_blocks - first, GROUP)
    inside = program % (GROUP * tiles)
    return first + inside % height, inside // height


@triton.jit
def _sum_kernel(
    results: tl.tensor, out: tl.tensor, HIDDEN: tl.constexpr, EXPERTS_EACH: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    total = tl.zeros((COLUMNS,), tl.float32)
    for number in tl.static_range(EXPERTS_EACH):
        total += tl.load(results + (token * EXPERTS_EACH + number) * HIDDEN + columns, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + token * HIDDEN + columns, total.to(out.dtype.element_ty), mask=inside)
