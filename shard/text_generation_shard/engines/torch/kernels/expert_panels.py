"""The mixture of experts in MXFP4 for tens of tokens, by tensor cores of 8 bits.

A number in bfloat16 has 8 significant bits: it is the sum of two numbers in E4M3, which have 4 each. A code in E2M1 times a power of
two is a number in E4M3, too, and seven instructions make eight of them. So a product is as precise as one in bfloat16, and needs far
fewer instructions: those of a conversion to bfloat16 take longer than reading the weights. Tensor cores add products of 8 bits with about
14 bits: sums over 128 inputs are added in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.activation import gate_and_up, gated
from text_generation_shard.engines.torch.kernels.expert_groups import ExpertGroups, group_by_expert
from text_generation_shard.engines.torch.kernels.expert_rows import weighted_sum
from text_generation_shard.engines.torch.kernels.operands import ExpertWeights, GatedActivation
from text_generation_shard.engines.torch.kernels.packed_weight import ExpertPanels
from text_generation_shard.engines.torch.kernels.pdl import after_previous, pdl
from text_generation_shard.engines.torch.kernels.rows import row_tile

_AT_ONCE = tl.constexpr(128)
"""Inputs of an iteration: two panels, with one scale for each output."""
_LOW_SCALE = tl.constexpr(16.0)
"""Factor of the low numbers, which are at most a sixteenth of the high ones: small ones stay exact."""


_BLOCK_N = tl.constexpr(128)
_STAGES = tl.constexpr(4)
_SPLITS = 4
"""Programs that take the blocks of an expert's rows in turns. Other blocks read the weight from the L2 cache for the most part."""


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows as sums of two numbers in E4M3: scale · (high + low / 16), exact for bfloat16 of at least 2^-13 of a row's largest."""

    values: Tensor
    """float8_e4m3fn [2, rows, inputs], high and low, with zeros up to a multiple of 128 inputs."""
    scales: Tensor
    """float32 [rows], powers of two."""


def panel_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: GatedActivation,
    panels: tuple[ExpertPanels, ExpertPanels],
) -> Tensor:
    """Return what `experts` does, for x in bfloat16; `panels` are the `panel_weights`."""
    groups = group_by_expert(ids, panels[0].scales.shape[0])
    inner = panel_product(split_rows(x), panels[0], groups, each=ids.shape[1])
    rows = split_rows(inner, gate_up.bias, groups.ends, activation)
    results = panel_product(rows, panels[1], groups, each=0)
    return weighted_sum(results, groups.rows, ids, weights, down.bias)


def split_rows(
    x: Tensor, bias: Tensor | None = None, ends: Tensor | None = None, activation: GatedActivation | None = None
) -> SplitRows:
    """Split rows [rows, inputs], or with an `activation` that of gates and ups [rows, 2 · inputs] after adding a bias.

    The bias [experts, 2 · inputs] and `ends` are those of `activate`.
    """
    inputs = x.shape[1] // (1 if activation is None else 2)
    padded = triton.cdiv(inputs, _AT_ONCE.value) * _AT_ONCE.value
    values = torch.empty(2, len(x), padded, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    block, num_warps = row_tile(padded, 8)
    experts = 0 if bias is None or ends is None else len(ends)
    is_interleaved = activation is not None and activation.interleaved
    _split_kernel[(len(x),)](
        x,
        bias,
        ends,
        values,
        scales,
        x.stride(0),
        1.0 if activation is None else activation.alpha,
        1.0 if activation is None else activation.limit,
        INPUTS=inputs,
        PADDED=padded,
        KIND="" if activation is None else activation.kind,
        STEP=2 if is_interleaved else 1,
        UP=1 if is_interleaved else inputs,
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts),
        BLOCK=block,
        num_warps=num_warps,
        **pdl(x),
    )
    return SplitRows(values, scales)


def panel_product(rows: SplitRows, weight: ExpertPanels, groups: ExpertGroups, *, each: int) -> Tensor:
    """Return the products with the weights of the experts, bfloat16 [pairs, outputs], as a `GroupedProduct` does."""
    experts, _, outputs = weight.scales.shape
    pairs = groups.order.shape[0]
    average = triton.cdiv(pairs, experts)
    out = torch.empty(pairs, outputs, dtype=torch.bfloat16, device=rows.values.device)
    _panel_kernel[(triton.cdiv(outputs, _BLOCK_N.value), _SPLITS, experts)](
        rows.values,
        rows.scales,
        weight.codes,
        weight.scales,
        out,
        groups.order,
        groups.offsets,
        rows.values.shape[1],
        INPUTS=rows.values.shape[2],
        PANELS=weight.codes.shape[1],
        OUTPUTS=outputs,
        EXPERTS_EACH=each,
        # The best on an H200 for gpt-oss-20b.
        BLOCK_M=8 if average <= 4 else 16 if average <= 16 else 32,
        num_warps=4,
        **pdl(out),
    )
    return out


@triton.jit
def _split_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    bias: tl.tensor | None,
    ends: tl.tensor | None,
    values: tl.tensor,
    scales: tl.tensor,
    x_stride: int,
    alpha: float,
    limit: float,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    KIND: tl.constexpr,
    STEP: tl.constexpr,
    UP: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Split a row. The largest value is scaled to at least 128 and less than 256."""
    after_previous(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < INPUTS
    at = x + row * x_stride + columns * STEP
    if KIND != "":
        gate, up = gate_and_up(at, bias, ends, row, columns * STEP, inside, UP, INPUTS, EXPERTS, BINS)
        # As rounded as the inner values of other kernels, and so as exact below.
        own = tl.where(inside, gated(gate, up, alpha, limit, KIND).to(tl.bfloat16).to(tl.float32), 0.0)
    else:
        own = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    exponent = (tl.max(tl.abs(own), axis=0).to(tl.int32, bitcast=True) >> 23) - 7
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    tl.store(scales + row, (exponent << 23).to(tl.float32, bitcast=True))
    own *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    high = _rounded(own)
    low = (own - high) * _LOW_SCALE
    tl.store(values + row * PADDED + columns, high.to(tl.float8e4nv), mask=columns < PADDED)
    tl.store(values + (row + tl.num_programs(0)) * PADDED + columns, low.to(tl.float8e4nv), mask=columns < PADDED)


@triton.jit
def _rounded(values: tl.tensor) -> tl.tensor:
    """Return the nearest numbers in E4M3, in float32.

    A conversion to E4M3 and back is compiled wrong by ptxas 12.8 if two of the numbers are also stored in one word: the instruction
    F2FP.F16.E4M3.UNPACK_B reads R1, which is no operand.
    """
    bits = values.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Below 2^-6 numbers in E4M3 have a distance of 2^-9, as those in float32 from 2^14 on.
    small = (values + 24576.0) - 24576.0
    return tl.where(tl.abs(values) < 0.015625, small, normal.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["offsets"])
def _panel_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    x_scales: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    offsets: tl.tensor,
    tokens: int,
    INPUTS: tl.constexpr,
    PANELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS_EACH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Multiply the rows of an expert with some outputs of its weight; the columns of a tile are the high, then the low parts."""
    after_previous(USE_PDL)
    expert = tl.program_id(2)
    end = tl.load(offsets + expert + 1)
    outputs = tl.program_id(0) * _BLOCK_N + tl.arange(0, _BLOCK_N)
    read = tl.minimum(outputs, OUTPUTS - 1)
    codes_at = codes + expert.to(tl.int64) * (PANELS * OUTPUTS * 32) + (read[:, None] * 32 + tl.arange(0, 32)[None, :])
    scales_at = scales + expert.to(tl.int64) * (INPUTS // _AT_ONCE * OUTPUTS) + read
    inputs = tl.arange(0, _AT_ONCE)
    column = tl.arange(0, 2 * BLOCK_M)
    is_low = column >= BLOCK_M
    begin = tl.load(offsets + expert)
    for first in range(begin + tl.program_id(1) * BLOCK_M, end, tl.num_programs(1) * BLOCK_M):
        sources = first + column % BLOCK_M
        sources = tl.where(sources < end, sources, begin)
        if EXPERTS_EACH:
            sources = tl.load(order + sources) // EXPERTS_EACH
        x_at = x + (sources + tl.where(is_low, tokens, 0)).to(tl.int64)[None, :] * INPUTS + inputs[:, None]
        sums = tl.zeros((_BLOCK_N, 2 * BLOCK_M), tl.float32)
        for some in tl.range(0, INPUTS // _AT_ONCE, num_stages=_STAGES):
            scale = tl.load(scales_at + some * OUTPUTS)
            panel = 2 * some + 1
            if INPUTS != PANELS * 64:  # x is zero there
                panel = tl.minimum(panel, PANELS - 1)
            numbers = tl.join(
                _numbers(tl.load(codes_at + 2 * some * (OUTPUTS * 32)), scale),
                _numbers(tl.load(codes_at + panel * (OUTPUTS * 32)), scale >> 8),
            )
            # One product of all inputs: the tensor cores do not wait for the numbers of the next group.
            numbers = tl.reshape(tl.permute(numbers, (0, 3, 2, 1)), (_BLOCK_N, _AT_ONCE))
            part = tl.dot(numbers.to(tl.float8e4nv, bitcast=True), tl.load(x_at + some * _AT_ONCE))
            sums += part * ((scale >> 16) << 23).to(tl.float32, bitcast=True)[:, None]
        sums *= (tl.load(x_scales + sources) * tl.where(is_low, 1.0 / _LOW_SCALE, 1.0))[None, :]
        result = tl.sum(tl.reshape(sums, (_BLOCK_N, 2, BLOCK_M)), axis=1)
        rows = first + tl.arange(0, BLOCK_M)
        targets = out + rows.to(tl.int64)[None, :] * OUTPUTS + outputs[:, None]
        tl.store(targets, result.to(out.dtype.element_ty), mask=(rows < end)[None, :] & (outputs < OUTPUTS)[:, None])


@triton.jit
def _numbers(tile: tl.tensor, shifts: tl.tensor) -> tl.tensor:
    """Return the numbers of two groups, bytes in E4M3 [outputs, 32, 2], from the bytes [outputs, 32] of a panel.

    Bits 0 to 3 of `shifts` [outputs] belong to the first group, bits 4 to 7 to the second one.

    A byte permutation looks up the magnitudes of four codes in a table of eight: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, times 2^(shift - 6).
    """
    first, second = shifts & 15, (shifts >> 4) & 15
    a_low, a_high = first * 0x08080800 + 0x0C080000, first * 0x08080808 + 0x1C181410
    b_low, b_high = second * 0x08080800 + 0x0C080000, second * 0x08080808 + 0x1C181410
    a, b = tl.inline_asm_elementwise(
        """{
        .reg .b32 m, t;
        and.b32 m, $2, 0x77777777;
        prmt.b32 t, $3, $7, m;
        lop3.b32 $0, $2, 0x80808080, t, 0xea;
        shr.u32 m, m, 16;
        prmt.b32 t, $11, $15, m;
        shl.b32 m, $2, 4;
        lop3.b32 $1, m, 0x80808080, t, 0xea;
        }""",
        "=r,=r" + ",r" * 17,
        [
            tile,
            tl.broadcast_to(a_low[:, None], (_BLOCK_N, 32)),
            tl.broadcast_to(a_high[:, None], (_BLOCK_N, 32)),
            tl.broadcast_to(b_low[:, None], (_BLOCK_N, 32)),
            tl.broadcast_to(b_high[:, None], (_BLOCK_N, 32)),
        ],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )
    return tl.join(a, b)
