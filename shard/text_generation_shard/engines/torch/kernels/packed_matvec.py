"""Products of a weight of packed integers with a few rows, with the operations next to them: see matvec.py.

A word of int32 holds codes of 4 or 8 bits of one row of the weight. On Hopper GPUs and later ones, codes of 4 bits and floats
are multiplied in float16, two at a time: see half_products.py. Other codes are multiplied in float32. Masked, and read as a float
without an exponent, a word is code j times a power of two, without any conversion: a denormal number, which a GPU multiplies as fast
as others. The values of x are multiplied by powers of two that make the products normal numbers of equal scale, so none of this
rounds. Codes that are floats are moved to where a float32 has its sign, and from there, sign extended, to its lowest bits of the
exponent and its highest of the mantissa.

A thread loads four words at once; in their blocks, see packed_weight.py, it needs four consecutive values of x for each j.
"""

# ruff: noqa: N806, RUF005 – kernel constants are in capitals, as usual in Triton, which joins tuples by +
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.activation import gated
from text_generation_shard.engines.torch.kernels.half_products import half_unit, sums_of_halves
from text_generation_shard.engines.torch.kernels.operands import ChosenExperts, GatedActivation, fused_arguments
from text_generation_shard.engines.torch.kernels.packed_weight import WORD_BITS, PackedWeight
from text_generation_shard.engines.torch.kernels.pdl import launch_dependents, pdl, supports_pdl, wait_for_previous
from text_generation_shard.engines.torch.kernels.rows import PROGRAMS_WANTED

_MANTISSA_BITS, _EXPONENT_BIAS = {32: 23, 8: 3, 4: 1}, {32: 127, 8: 7, 4: 1}
"""By the bits of a float: float32, E4M3 and E2M1."""
_DENORMAL_BITS = 149
"""The smallest float32 is 2^-149."""
_UNIT = tl.constexpr(2.0**-63)
"""The scale of the products of codes and x: x may be as large as 2^40 and as small as 2^-60."""
_WORDS_OF_A_WARP = 128
"""16 bytes for each thread."""
_BLOCK_N = 8
"""The best, or nearly, of -m text_generation_bench.quantized_tilings --rows 1 for the products of 8B and 27B models on an H200."""


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """Tiling of a product."""

    block_n: int
    """Outputs per program; with gates, pairs of outputs."""
    num_warps: int
    ahead: int = 1
    """Parts of a row, of 128 words for each warp, that are loaded before x, or in advance."""


def config_for(outputs: int, inputs: int, bits: int, *, gated: bool = False, experts: bool = False) -> PackedConfig:
    """Return the tiling of a weight; if `gated`, `outputs` counts gate and up rows."""
    if experts:
        # The best, or nearly, for those of gpt-oss-20b in E2M1 and of Qwen3-30B-A3B in E4M3 and int4, on an H200.
        padding = [-inputs * bits // WORD_BITS % (_WORDS_OF_A_WARP * warps) for warps in (2, 1)]
        return PackedConfig(_BLOCK_N // 2 if gated else _BLOCK_N, 2 if padding[0] <= padding[1] else 1, 2)
    columns, parts = outputs // (2 if gated else 1), inputs * bits // WORD_BITS // _WORDS_OF_A_WARP
    block_n = _BLOCK_N
    while block_n > 1 and columns < block_n * PROGRAMS_WANTED:
        block_n //= 2
    warps = triton.next_power_of_2(max(parts, 1))
    if bits == 8:
        return PackedConfig(block_n, min(warps, 4 if gated else 8))
    return PackedConfig(block_n, min(warps, 2 if block_n == _BLOCK_N else 4))


def packed_matvec(  # noqa: PLR0913 – the options of one kernel
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor | None, float] = (None, 0.0),
    activation: GatedActivation | None = None,
    add: bool = False,
    scale: float = 1.0,
    experts: ChosenExperts | None = None,
    config: PackedConfig | None = None,
) -> None:
    """out = scale · (x · weightᵀ (+ bias)), or out += that if `add`; rounded once to the dtype of `out`.

    `x` [rows, inputs] and `out` [rows, outputs] in any float dtype, `bias` [outputs]. With a `norm` (weight [inputs] and eps), x is
    normed first, see norm.py. With an `activation`, half of the weight's rows are gates and out [rows, outputs / 2] =
    act(gate) · up. With `experts`: as in matvec.py.
    """
    outputs, width = weight.words.shape
    inputs = x.shape[1]
    if experts is not None:
        outputs //= experts.count
    config = config or config_for(
        outputs * len(out), inputs, weight.bits, gated=activation is not None, experts=experts is not None
    )
    block_w = min(_WORDS_OF_A_WARP * config.num_warps, triton.next_power_of_2(width))
    columns = outputs if activation is None else outputs // 2
    _packed_kernel[(triton.cdiv(columns, config.block_n), len(out))](
        x,
        norm[0],
        weight.words,
        weight.scales,
        weight.zeros,
        bias,
        out,
        None if experts is None else experts.ids,
        x.stride(0),
        out.stride(0),
        columns,
        norm[1],
        K=inputs,
        BITS=weight.bits,
        GROUPS=weight.scales.shape[1],
        PLANE=weight.plane,
        FLOATS=weight.floats,
        HALVES=_multiplies_halves(x, weight, out),
        ADD=add,
        SCALE=scale,
        AHEAD=config.ahead,
        BLOCK_N=config.block_n,
        BLOCK_W=block_w,
        num_warps=config.num_warps,
        **fused_arguments(activation, experts),
        **pdl(x),
    )


def _multiplies_halves(x: Tensor, weight: PackedWeight, out: Tensor) -> bool:
    """Return True if the products are those of half_products.py: unless all is in float32, or on GPUs before Hopper."""
    is_float32 = x.dtype == out.dtype == torch.float32
    return supports_pdl(x) and not is_float32 and (weight.floats or weight.bits == 4)


@triton.jit
def _packed_kernel(  # noqa: PLR0913, PLR0915, C901 – a kernel's arguments are flat
    x: tl.tensor,
    norm_weight: tl.tensor | None,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor | None,
    bias: tl.tensor | None,
    out: tl.tensor,
    ids: tl.tensor | None,
    x_stride: int,
    out_stride: int,
    columns: int,
    eps: float,
    alpha: float,
    limit: float,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLANE: tl.constexpr,
    FLOATS: tl.constexpr,
    HALVES: tl.constexpr,
    EXPERTS_EACH: tl.constexpr,
    IDS_KNOWN: tl.constexpr,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    USE_PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    PER_WORD: tl.constexpr = 32 // BITS
    WIDTH: tl.constexpr = K // PER_WORD
    CHUNKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    PARTS: tl.constexpr = 1 if KIND is None else 2
    UNIT: tl.constexpr = half_unit(BITS, FLOATS) if HALVES else _UNIT
    if not IDS_KNOWN:  # as in matvec.py
        wait_for_previous(USE_PDL)
    launch_dependents(USE_PDL)
    first = tl.program_id(0) * BLOCK_N
    local = tl.arange(0, PARTS * BLOCK_N)
    # Gate and up alternate in a program.
    pairs = tl.minimum(first + local // PARTS, columns - 1)
    rows = 2 * pairs + local % PARTS if INTERLEAVED else local % PARTS * columns + pairs
    row = tl.program_id(1)
    x += row // EXPERTS_EACH * x_stride
    if ids is not None:
        rows += tl.load(ids + row) * (PARTS * columns)
    tiles = ()
    for chunk in tl.static_range(min(AHEAD, CHUNKS)):
        tiles = tiles + (_tile(words, scales, rows, chunk * BLOCK_W, WIDTH, GROUPS, BLOCK_W),)  # type: ignore[assignment]
    if IDS_KNOWN:
        wait_for_previous(USE_PDL)
    sums = tl.zeros((PARTS * BLOCK_N, BLOCK_W // 4), tl.float32)
    squares = tl.zeros((BLOCK_W,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        if chunk + AHEAD < CHUNKS:
            tiles = tiles + (_tile(words, scales, rows, (chunk + AHEAD) * BLOCK_W, WIDTH, GROUPS, BLOCK_W),)  # type: ignore[assignment]
        word = chunk * BLOCK_W + tl.arange(0, BLOCK_W)
        inside = word < WIDTH
        inputs = word // PLANE * (PLANE * PER_WORD) + word % PLANE
        values = ()
        total = tl.zeros((BLOCK_W,), tl.float32)
        for j in tl.static_range(PER_WORD):
            part = _inputs(x + inputs + j * PLANE, inside, (chunk + 1) * BLOCK_W <= WIDTH)
            if norm_weight is not None:
                squares += part * part
                part *= _inputs(norm_weight + inputs + j * PLANE, inside, (chunk + 1) * BLOCK_W <= WIDTH)
            total += part
            values = values + (part if HALVES else part * _factor(BITS, j, FLOATS),)  # type: ignore[assignment]
        tile = tiles[chunk]  # type: ignore[var-annotated]
        codes = tile[0]  # type: ignore[var-annotated]
        if HALVES:
            quads = sums_of_halves(codes, values, BITS, FLOATS)
        else:
            products = tl.zeros((PARTS * BLOCK_N, BLOCK_W), tl.float32)
            for j in tl.static_range(PER_WORD):
                products += _code(codes, BITS, j, FLOATS) * values[j][None, :]
            quads = _sum_of_fours(products, PARTS * BLOCK_N, BLOCK_W)
        if not FLOATS:
            total = tl.sum(tl.reshape(total * -UNIT, (BLOCK_W // 4, 4)), axis=1)
            if zeros is None:
                quads += total[None, :] * (1 << (BITS - 1))
            else:
                quad_zeros = _of_groups(zeros, rows, chunk * BLOCK_W, WIDTH, GROUPS, BLOCK_W).to(tl.float32)
                quads += quad_zeros * total[None, :]
        sums += quads * tile[1].to(tl.float32)
    result = tl.sum(sums, axis=1)
    result *= 1 / UNIT
    if norm_weight is not None:
        result *= tl.rsqrt(tl.sum(squares) / K + eps)
    if bias is not None:
        result += tl.load(bias + rows).to(tl.float32)
    column = first + tl.arange(0, BLOCK_N)
    targets = out + row * out_stride + column
    if KIND is not None:
        gate, up = tl.split(tl.reshape(result, (BLOCK_N, 2)))
        result = gated(gate, up, alpha, limit, KIND)
    if SCALE != 1.0:
        result *= SCALE
    if ADD:
        result += tl.load(targets, mask=column < columns, other=0.0)
    tl.store(targets, result.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def _tile(
    words: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    start: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load words [rows, BLOCK_W] from `start` on, and the scale of each four of them. Not cached: they are read once."""
    word = start + tl.arange(0, BLOCK_W)
    pointers = words + rows.to(tl.int64)[:, None] * WIDTH + word[None, :]
    if start + BLOCK_W <= WIDTH:
        loaded = tl.load(pointers, eviction_policy="evict_first")
    else:
        loaded = tl.load(pointers, mask=word[None, :] < WIDTH, other=0, eviction_policy="evict_first")
    return loaded.to(tl.uint32, bitcast=True), _of_groups(scales, rows, start, WIDTH, GROUPS, BLOCK_W)


@triton.jit
def _of_groups(
    values: tl.tensor,
    rows: tl.tensor,
    start: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> tl.tensor:
    """Load the value of the group of each four words."""
    word = start + 4 * tl.arange(0, BLOCK_W // 4)
    group = tl.minimum(word // (WIDTH // GROUPS), GROUPS - 1)  # beyond the last word, x is zero
    return tl.load(values + rows.to(tl.int64)[:, None] * GROUPS + group[None, :])


@triton.jit
def _inputs(pointers: tl.tensor, inside: tl.tensor, ALL_INSIDE: tl.constexpr) -> tl.tensor:
    """Load values as float32, zero where not `inside`."""
    if ALL_INSIDE:
        return tl.load(pointers).to(tl.float32)
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sum_of_fours(values: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Return the sums of each four columns."""
    return tl.sum(tl.reshape(values, (ROWS, WIDTH // 4, 4)), axis=2)


@triton.constexpr_function
def _shift(BITS: int, j: int) -> int:
    """Return the number of bits by which a word is shifted right, so that code j lies in the mantissa, its 23 lowest bits."""
    return 0 if BITS * (j + 1) <= _MANTISSA_BITS[WORD_BITS] else WORD_BITS // 2


@triton.constexpr_function
def _factor(BITS: int, j: int, FLOATS: bool) -> float:  # noqa: FBT001 – as called in a kernel
    """Return the factor that makes each product of x and code j, as `_code` returns it, _UNIT times their product."""
    if FLOATS:
        return float(_UNIT.value * 2.0 ** (_EXPONENT_BIAS[WORD_BITS] - _EXPONENT_BIAS[BITS]))
    return float(_UNIT.value * 2.0 ** (_DENORMAL_BITS - BITS * j + _shift(BITS, j)))


@triton.constexpr_function
def _float_shift(BITS: int) -> int:
    """Return the number of bits by which a code in the highest bits is shifted, so that its mantissa begins that of a float32."""
    return WORD_BITS - BITS - (_MANTISSA_BITS[WORD_BITS] - _MANTISSA_BITS[BITS])


@triton.constexpr_function
def _float_mask(BITS: int) -> int:
    """Return the bits of a code in a float32, as an int32: its sign, which the bits after it repeat, and the others."""
    return (((1 << BITS - 1) - 1) << _MANTISSA_BITS[WORD_BITS] - _MANTISSA_BITS[BITS]) - (1 << WORD_BITS - 1)


@triton.jit
def _code(words: tl.tensor, BITS: tl.constexpr, j: tl.constexpr, FLOATS: tl.constexpr) -> tl.tensor:
    """Return code j of each word as float32, times a power of two."""
    if FLOATS:
        code = (words << (32 - BITS * (j + 1))).to(tl.int32, bitcast=True) >> _float_shift(BITS) & _float_mask(BITS)
    else:
        SHIFT: tl.constexpr = _shift(BITS, j)
        code = (words >> SHIFT) & (((1 << BITS) - 1) << (BITS * j - SHIFT))
    return code.to(tl.float32, bitcast=True)
