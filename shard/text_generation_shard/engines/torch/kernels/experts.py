"""The grouped product of a mixture of experts: see layers/expert_linear.py for the formula.

A few tokens are computed pair by pair, see few_experts.py, tens of tokens with experts in MXFP4 by panels, see expert_panels.py. For
others there are two products over the pairs (token, expert), grouped by expert: by ours while few rows have the same expert, by
torch's kernel or that of packed weights. The gated activation follows the first. A last kernel adds the weighted results of each
token in the order of its experts. So the same inputs give the same bits, and nothing waits for the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.kernels.activation import activate, gated
from text_generation_shard.engines.torch.kernels.expert_groups import ExpertGroups, group_by_expert
from text_generation_shard.engines.torch.kernels.expert_panels import panel_experts
from text_generation_shard.engines.torch.kernels.expert_rows import gathered, weighted_sum
from text_generation_shard.engines.torch.kernels.few_experts import few_experts
from text_generation_shard.engines.torch.kernels.operands import (
    ExpertWeights,
    GatedActivation,
    few_weights,
    panel_weights,
)
from text_generation_shard.engines.torch.kernels.pdl import after_previous, pdl
from text_generation_shard.engines.torch.kernels.rows import is_on_hopper

ALIGNMENT = 8
"""Inputs of torch's kernel are a multiple of this."""
FEW_ROWS = 32
"""Rows of an average expert up to which our kernel is used: it reads the weights as fast as a copy, torch's at 65 %."""
SPLITS = 4
"""Programs that take the blocks of an expert's rows in turns. Texts of one kind choose some experts far more often than others."""


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """Tiles of a grouped product: rows, columns (of gate and of up each, if gated) and inputs at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tiling_for(pairs: int, experts: int, dtype: torch.dtype) -> ExpertTiling:
    """Return the tiling of a product. Blocks have more rows than an average expert, so that few weights are read twice."""
    average = triton.cdiv(pairs, experts)
    if dtype == torch.float32:  # tests
        return ExpertTiling(16, 64, 32, num_warps=4, num_stages=2)
    if average <= FEW_ROWS:
        return ExpertTiling(32 if average <= 24 else 64, 64, 64, num_warps=4, num_stages=3)
    return ExpertTiling(min(triton.next_power_of_2(average), 128), 128, 64, num_warps=8, num_stages=3)


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
    if product is None and activation.has_gate and (panels := panel_weights(gate_up, down, ids.numel())):
        return panel_experts(x, ids, weights, gate_up, down, activation, panels)
    if product is None:
        product = grouped_mm if _is_faster_by_library(x, gate_up, down, ids.numel()) else grouped_product
    k, num_experts = ids.shape[1], len(gate_up.weight)
    groups = group_by_expert(ids, num_experts)
    inner = product(x, gate_up, groups, each=k, activation=activation if activation.has_gate else None)
    if not activation.has_gate:
        inner = activation(inner)
    results = product(inner, down, groups, each=0, activation=None)
    return weighted_sum(results, groups.rows, ids, weights, down.bias)


def _is_faster_by_library(x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, pairs: int) -> bool:
    """Return True if weights are packed, or if torch's product is faster and takes the operands without waiting."""
    if gate_up.packed_product is not None:
        return True
    # On Hopper torch has a kernel for bfloat16 that does not wait for the host.
    if pairs <= FEW_ROWS * len(gate_up.weight) or x.dtype != torch.bfloat16 or not is_on_hopper(x):
        return False
    return all(
        linear.weight.dtype == x.dtype and linear.weight.is_contiguous() and linear.weight.shape[2] % ALIGNMENT == 0
        for linear in (gate_up, down)
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
    activate(products, activation, out, bias=linear.bias, ends=groups.ends)
    return out


def grouped_product(
    x: Tensor, linear: ExpertWeights, groups: ExpertGroups, *, each: int, activation: GatedActivation | None
) -> Tensor:
    """Compute a `GroupedProduct` by one kernel, for any dtype and any strides of the weights."""
    weight = linear.weight
    bias = None if activation is None else linear.bias
    experts, outputs, inputs = weight.shape
    columns = outputs if activation is None else outputs // 2
    pairs = groups.order.shape[0]
    out = x.new_empty(pairs, columns)
    tiling = tiling_for(pairs, experts, weight.dtype)
    # Rows of gate (or of all outputs), and the distance to the row of up.
    step, up = (1, 0) if activation is None else (2, 1) if activation.interleaved else (1, columns)
    bias_strides = (0, 0) if bias is None else bias.stride()
    _product_kernel[(triton.cdiv(columns, tiling.block_n), SPLITS, experts)](
        x,
        weight,
        bias,
        out,
        groups.order,
        groups.offsets,
        x.stride(0),
        weight.stride(0),
        step * weight.stride(1),
        up * weight.stride(1),
        bias_strides[0],
        step * bias_strides[1],
        up * bias_strides[1],
        out.stride(0),
        1.0 if activation is None else activation.alpha,
        1.0 if activation is None else activation.limit,
        INPUTS=inputs,
        INPUT_STRIDE=weight.stride(2),
        COLUMNS=columns,
        EXPERTS_EACH=each,
        KIND="" if activation is None else activation.kind,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **pdl(x),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def _product_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    order: tl.tensor,
    offsets: tl.tensor,
    x_stride: int,
    expert_stride: int,
    column_stride: int,
    up_distance: int,
    bias_expert_stride: int,
    bias_column_stride: int,
    bias_up_distance: int,
    out_stride: int,
    alpha: float,
    limit: float,
    INPUTS: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS_EACH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Multiply the rows of an expert with some columns of its weight, which is the left operand: tensor cores want 64 rows there.

    INPUT_STRIDE is a constant because Triton does not specialize an annotated integer that is 1: it would load number by number.
    """
    after_previous(USE_PDL)
    # The last expert may be one of all tokens: its programs, which take the longest, come first.
    expert = tl.num_programs(2) - 1 - tl.program_id(2)
    end = tl.load(offsets + expert + 1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < COLUMNS
    inputs = tl.arange(0, BLOCK_K)
    # An expert's weight has less than 2³¹ elements, those of all experts may have more.
    read = tl.minimum(columns, COLUMNS - 1)
    weights = (
        weight + expert.to(tl.int64) * expert_stride + read[:, None] * column_stride + inputs[None, :] * INPUT_STRIDE
    )
    begin = tl.load(offsets + expert) + tl.program_id(1) * BLOCK_M
    for first in range(begin, end, tl.num_programs(1) * BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < end
        sources = rows
        if EXPERTS_EACH:
            sources = tl.load(order + rows, mask=is_row, other=0) // EXPERTS_EACH
        x_at = x + sources.to(tl.int64)[:, None] * x_stride + inputs[None, :]
        gate_at = weights
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            is_input = start + inputs < INPUTS
            some = _tile(x_at, is_row[:, None] & is_input[None, :], MASKED=True).to(weight.dtype.element_ty)
            some = tl.trans(some)
            gate = tl.dot(
                _tile(gate_at, is_input[None, :], MASKED=INPUTS % BLOCK_K != 0), some, gate, input_precision="ieee"
            )
            if KIND != "":
                up_tile = _tile(gate_at + up_distance, is_input[None, :], MASKED=INPUTS % BLOCK_K != 0)
                up = tl.dot(up_tile, some, up, input_precision="ieee")
            x_at += BLOCK_K
            gate_at += BLOCK_K * INPUT_STRIDE
        if bias is not None:
            bias_at = bias + expert * bias_expert_stride + read * bias_column_stride
            gate += tl.load(bias_at).to(tl.float32)[:, None]
            if KIND != "":
                up += tl.load(bias_at + bias_up_distance).to(tl.float32)[:, None]
        if KIND != "":
            gate = gated(gate, up, alpha, limit, KIND)
        out_at = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        tl.store(out_at, tl.trans(gate.to(out.dtype.element_ty)), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _tile(pointers: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """Load a tile, with zeros outside of the mask if it is MASKED."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    return tl.load(pointers)
