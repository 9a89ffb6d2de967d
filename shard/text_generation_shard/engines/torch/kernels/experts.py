"""The grouped product of a mixture of experts: see layers/expert_linear.py for the formula.

A few tokens are computed pair by pair, see few_experts.py. For others there are two products over the pairs (token, expert),
grouped by expert, by torch's kernel, by that of packed weights or by ours; the gated activation follows the first. A last kernel
adds the weighted results of each token in the order of its experts. So the same inputs
give the same bits, and nothing waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.kernels.activation import gated, launch_activation
from text_generation_shard.engines.torch.kernels.expert_groups import ExpertGroups, group_by_expert
from text_generation_shard.engines.torch.kernels.expert_rows import gathered, weighted_sum
from text_generation_shard.engines.torch.kernels.few_experts import few_experts
from text_generation_shard.engines.torch.kernels.operands import ExpertWeights, GatedActivation, few_weights
from text_generation_shard.engines.torch.kernels.rows import PROGRAMS_WANTED

HOPPER = 9
"""The major compute capability for which torch has a kernel for bfloat16 that does not wait for the host."""
ALIGNMENT = 8
"""Inputs of torch's kernel are a multiple of this."""


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
    """Return the rows of a block, in the range of tensor cores, which float32 does not use.

    Few rows: twice those of an average expert, so that few weights are read twice. Many: half of them, so that few rows are empty.
    """
    most = 32 if dtype == torch.float32 else 128
    average = triton.cdiv(pairs, experts)
    rows: int = triton.next_power_of_2(2 * average if average <= 32 else triton.cdiv(average, 2))
    return min(max(rows, 16), most)


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
    while block_n > 16 and groups.max_blocks * triton.cdiv(columns, block_n) < PROGRAMS_WANTED:
        block_n //= 2
    return ExpertTiling(rows, block_n, 32 if dtype == torch.float32 else 64, num_warps=4, num_stages=4)


class GroupedProduct(Protocol):
    """The product of rows with the weights of their experts."""

    def __call__(
        self, x: Tensor, linear: ExpertWeights, groups: ExpertGroups, *, each: int, activation: GatedActivation | None
    ) -> Tensor:
        """Return [rows, columns] in the order of `groups`, activated if `activation` is given, else without a bias.

        Rows of `x` are tokens, with `each` experts, or if that is 0, those of the groups.
        """
        ...


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: GatedActivation,
    product: GroupedProduct | None = None,
) -> Tensor:
    """Return the weighted sum over the k experts of each token, [tokens, hidden], in the dtype of `x` [tokens, hidden].

    `ids` (an integer type) and `weights` (float32) are [tokens, k], contiguous. Products are summed in float32; the results of the
    gated activation and of each expert are rounded to the dtype of x. `product` replaces the fastest one.
    """
    if product is None and (few := few_weights(gate_up, down, ids.numel())):
        return few_experts(x, ids, weights, gate_up, down, activation, few)
    if product is None:
        by_library = gate_up.packed_product is not None or _has_grouped_mm(x, gate_up, down)
        product = grouped_mm if by_library else grouped_product
    k, num_experts = ids.shape[1], len(gate_up.weight)
    groups = group_by_expert(ids, num_experts, block_rows(ids.numel(), num_experts, gate_up.weight.dtype))
    inner = product(x, gate_up, groups, each=k, activation=activation if activation.has_gate else None)
    if not activation.has_gate:
        inner = activation(inner)
    results = product(inner, down, groups, each=0, activation=None)
    return weighted_sum(results, groups.rows, ids, weights, down.bias)


def _has_grouped_mm(x: Tensor, *linears: ExpertWeights) -> bool:
    """Return True if torch's grouped product, which is up to five times as fast, takes the operands without waiting."""
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] != HOPPER:
        return False
    return x.dtype == torch.bfloat16 and all(
        linear.weight.dtype == x.dtype and linear.weight.is_contiguous() and linear.weight.shape[2] % ALIGNMENT == 0
        for linear in linears
    )


def grouped_mm(
    x: Tensor, linear: ExpertWeights, groups: ExpertGroups, *, each: int, activation: GatedActivation | None
) -> Tensor:
    """Compute a `GroupedProduct` by torch's kernel or that of packed weights, and kernels before and after it."""
    if each:
        x = gathered(x, groups, each)
    if linear.packed_product is None:
        products = functional.grouped_mm(x, linear.weight.transpose(1, 2), offs=groups.ends)
    else:
        products = linear.packed_product(x, groups.offsets)
    if activation is None:
        return products
    out = products.new_empty(len(products), products.shape[1] // 2)
    launch_activation(products, linear.bias, groups.ends, out, activation)
    return out


def grouped_product(
    x: Tensor, linear: ExpertWeights, groups: ExpertGroups, *, each: int, activation: GatedActivation | None
) -> Tensor:
    """Compute a `GroupedProduct` by one kernel, for any dtype and any strides of the weights."""
    weight = linear.weight
    bias = None if activation is None else linear.bias
    _, outputs, inputs = weight.shape
    columns = outputs if activation is None else outputs // 2
    out = x.new_empty(groups.order.shape[0], columns)
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
        EXPERTS_EACH=each,
        KIND="" if activation is None else activation.kind,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        GROUP=tiling.group,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out


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
    sources = rows
    if EXPERTS_EACH:
        sources = tl.load(order + rows, mask=is_row, other=0) // EXPERTS_EACH
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
    if KIND != "":
        gate = gated(gate, up, alpha, limit, KIND)
    out_at = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
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
