"""Products of a weight of packed integers with a few rows, with the operations next to them: see matvec.py.

A product with one row takes as long as reading its weight only if a code costs less than two instructions. So x becomes integers
of 16 bits, with a common unit for each 32 inputs (64 bytes of codes of 8 bits: 16 inputs), and an instruction multiplies two of
them with two bytes of codes. Codes of 4 bits become bytes by a mask. The sum of 32 products is exact; its error is that of rounding
x to 1 / 32,767 of the largest of the 32, which is less than that of rounding x to bfloat16.

A program computes several blocks of outputs: x is converted once, and the next block is loading while one is multiplied. The first
is loading before x is known, see pdl.py. Each result is a sum in a fixed order: the same inputs give the same bits.
"""

# ruff: noqa: N803, N806, RUF005 – kernel constants are in capitals, as usual in Triton, which joins tuples by +
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.activation import activated
from text_generation_shard.engines.torch.kernels.packed_weight import WORD_BITS, PackedWeight
from text_generation_shard.engines.torch.kernels.pdl import launch_dependents, supports_pdl, wait_for_previous

_WORDS_OF_A_WARP = 128
"""16 bytes for each thread."""
_MULTIPROCESSORS = 132
"""The number of an H200."""
_LARGEST = tl.constexpr(32767.0)
_ROUNDING = tl.constexpr(1.5 * 2**23)
"""Added to a float of less than 2^22, this leaves its integer in the lowest bits."""


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """Tiling of a product."""

    block_n: int
    """Outputs of a block; with gates, pairs of outputs."""
    num_warps: int
    ahead: int = 1
    """Parts of a row, of 128 words for each warp, that are loading while one is multiplied."""
    programs: int = 4 * _MULTIPROCESSORS
    """Most programs: as many as the device runs at once."""


def config_for(outputs: int, inputs: int, bits: int, *, gated: bool = False) -> PackedConfig:
    """Return the tiling of a weight; if `gated`, `outputs` counts gate and up rows."""
    parts, columns = (2, outputs // 2) if gated else (1, outputs)
    warps = triton.next_power_of_2(max(inputs * bits // WORD_BITS // _WORDS_OF_A_WARP, 1))
    is_long = warps > 8
    block_n = (4 if is_long else 8) // parts
    while block_n > 1 and columns < block_n * 2 * _MULTIPROCESSORS:
        block_n //= 2
    # More warps have fewer registers, and x takes more of them.
    programs = (2 if is_long else 4) * _MULTIPROCESSORS
    return PackedConfig(block_n, min(warps, 8 if is_long else 4), programs=programs)


def packed_matvec(  # noqa: PLR0913 – the options of one kernel
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor | None, float] = (None, 0.0),
    kind: str | None = None,
    add: bool = False,
    scale: float = 1.0,
    config: PackedConfig | None = None,
) -> None:
    """out = scale · (x · weightᵀ (+ bias)), or out += that if `add`; rounded once to the dtype of `out`.

    `x` [rows, inputs] and `out` [rows, outputs] in any float dtype, `bias` [outputs]. With a `norm` (weight [inputs] and eps), x is
    normed first, see norm.py. With the `kind` of an activation, see `activate`, the first half of the weight's rows are gates and
    out [rows, outputs / 2] = act(gate) · up.
    """
    outputs, width = weight.words.shape
    gated = kind is not None
    config = config or config_for(outputs, x.shape[1], weight.bits, gated=gated)
    use_pdl = supports_pdl(x)
    columns = outputs // 2 if gated else outputs
    blocks = triton.cdiv(columns, config.block_n)
    # All programs have the same number of blocks, or one less.
    programs = triton.cdiv(blocks, triton.cdiv(blocks, config.programs))
    _packed_kernel[(programs, len(x))](
        x,
        norm[0],
        weight.words,
        weight.scales,
        weight.zeros,
        bias,
        out,
        x.stride(0),
        out.stride(0),
        columns,
        norm[1],
        WIDTH=width,
        BITS=weight.bits,
        GROUPS=weight.scales.shape[1],
        PLANE=weight.plane,
        KIND=kind,
        ADD=add,
        SCALE=scale,
        USE_PDL=use_pdl,
        USE_ASM=x.is_cuda,
        AHEAD=config.ahead,
        BLOCK_N=config.block_n,
        BLOCK_W=min(_WORDS_OF_A_WARP * config.num_warps, triton.next_power_of_2(width)),
        num_warps=config.num_warps,
        launch_pdl=use_pdl,
    )


@triton.jit
def _packed_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    norm_weight: tl.tensor | None,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor | None,
    bias: tl.tensor | None,
    out: tl.tensor,
    x_stride: int,
    out_stride: int,
    columns: int,
    eps: float,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLANE: tl.constexpr,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    USE_PDL: tl.constexpr,
    USE_ASM: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    CHUNKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    AT_ONCE: tl.constexpr = min(AHEAD, CHUNKS)
    PARTS: tl.constexpr = 1 if KIND is None else 2
    launch_dependents(USE_PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = _empty()
    for chunk in tl.static_range(AT_ONCE):
        tile = _tile(
            words, scales, zeros, program * BLOCK_N, columns, chunk * BLOCK_W, WIDTH, GROUPS, PARTS, BLOCK_N, BLOCK_W
        )
        tiles = _with(tiles, tile)
    wait_for_previous(USE_PDL)
    x += tl.program_id(1) * x_stride
    out += tl.program_id(1) * out_stride
    squares = tl.zeros((BLOCK_W,), tl.float32)
    inputs = _empty()
    for chunk in tl.static_range(CHUNKS):
        values, squares = _values(x, norm_weight, squares, chunk * BLOCK_W, WIDTH, 32 // BITS, PLANE, BLOCK_W)
        inputs = _with(inputs, _integers(values, BITS, BLOCK_W, zeros is None, USE_ASM))
    scale = 1.0
    if norm_weight is not None:
        # The scale depends on the whole row, so it is applied last.
        scale = tl.rsqrt(tl.sum(squares) / (WIDTH * (32 // BITS)) + eps)
    for first in tl.range(program * BLOCK_N, columns, programs * BLOCK_N):
        sums = tl.zeros((PARTS * BLOCK_N, BLOCK_W // 4), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            next_first = first + (chunk + AT_ONCE) // CHUNKS * (programs * BLOCK_N)
            next_tile = _tile(
                words,
                scales,
                zeros,
                next_first,
                columns,
                (chunk + AT_ONCE) % CHUNKS * BLOCK_W,
                WIDTH,
                GROUPS,
                PARTS,
                BLOCK_N,
                BLOCK_W,
            )
            tiles = _with(tiles, next_tile)
            sums += _products(tiles[chunk], inputs[chunk], BITS, zeros is None, USE_ASM)
        tiles = tiles[CHUNKS:]
        _store(out, bias, tl.sum(sums, axis=1) * scale, first, columns, KIND, ADD, SCALE, PARTS, BLOCK_N)


@triton.jit
def _empty() -> tl.tuple:
    return ()


@triton.jit
def _with(items: tl.tuple, item: tl.tensor) -> tl.tuple:
    return items + (item,)


@triton.jit
def _rows(first: tl.tensor, columns: int, PARTS: tl.constexpr, BLOCK_N: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the first row of the weight of a block of outputs, and the others relative to it; gate and up alternate."""
    local = tl.arange(0, PARTS * BLOCK_N)
    # The last block repeats outputs of the one before it where its own are fewer.
    return tl.minimum(first, columns - BLOCK_N), (local % PARTS) * columns + local // PARTS


@triton.jit
def _tile(  # noqa: PLR0913 – called from a kernel only
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor | None,
    first: tl.tensor,
    columns: int,
    start: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> tl.tuple:
    """Load words [rows, BLOCK_W] from `start` on, and the scale and zero point of each four of them; nothing beyond the outputs.

    They are not cached, because they are read once.
    """
    row, rows = _rows(first, columns, PARTS, BLOCK_N)
    word = start + tl.arange(0, BLOCK_W)
    wanted = first < columns
    is_word = wanted if start + BLOCK_W <= WIDTH else wanted & (word[None, :] < WIDTH)
    pointers = words + row.to(tl.int64) * WIDTH + (rows[:, None] * WIDTH + word[None, :])
    codes = tl.load(pointers, mask=is_word, other=0, eviction_policy="evict_first")
    # Words beyond the last are multiplied by zero.
    group = tl.minimum((start + 4 * tl.arange(0, BLOCK_W // 4)) // (WIDTH // GROUPS), GROUPS - 1)
    places = row.to(tl.int64) * GROUPS + (rows[:, None] * GROUPS + group[None, :])
    tile = (codes, tl.load(scales + places, mask=wanted, other=0.0))
    if zeros is not None:
        tile = _with(tile, tl.load(zeros + places, mask=wanted, other=0))
    return tile


@triton.jit
def _values(  # noqa: PLR0913 – called from a kernel only
    x: tl.tensor,
    norm_weight: tl.tensor | None,
    squares: tl.tensor,
    start: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_WORD: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:
    """Return x · norm_weight for each code of the words from `start` on, as float32, and the squares with those of x added."""
    word = start + tl.arange(0, BLOCK_W)
    places = word // PLANE * (PLANE * PER_WORD) + word % PLANE
    values = _empty()
    for j in tl.static_range(PER_WORD):
        value = tl.load(x + places + j * PLANE, mask=word < WIDTH, other=0.0).to(tl.float32)
        if norm_weight is not None:
            squares += value * value
            value *= tl.load(norm_weight + places + j * PLANE, mask=word < WIDTH, other=0.0).to(tl.float32)
        values = _with(values, value)
    return values, squares


@triton.jit
def _integers(
    values: tl.tuple, BITS: tl.constexpr, BLOCK_W: tl.constexpr, SYMMETRIC: tl.constexpr, USE_ASM: tl.constexpr
) -> tuple[tl.tuple, tl.tensor, tl.tensor]:
    """Return values as pairs of integers of 16 bits; their sum in each word, times minus the middle code if SYMMETRIC; and the
    unit of each four words."""
    largest = tl.abs(values[0])
    for j in tl.static_range(1, 32 // BITS):
        largest = _larger(largest, tl.abs(values[j]))
    largest = tl.reduce(tl.reshape(largest, (BLOCK_W // 4, 4)), 1, _larger)
    unit = _larger(largest, 1e-30) / _LARGEST
    factor = tl.reshape(tl.broadcast_to((1.0 / unit)[:, None], (BLOCK_W // 4, 4)), (BLOCK_W,))
    pairs = _empty()
    total = tl.zeros((BLOCK_W,), tl.int32)
    for k in tl.static_range(16 // BITS):
        low = (values[_code(BITS, k)] * factor + _ROUNDING).to(tl.int32, bitcast=True)
        high = (values[_code(BITS, k) + 8 // BITS] * factor + _ROUNDING).to(tl.int32, bitcast=True)
        pair = (low & 0xFFFF) | (high << 16)
        total = _add_products(pair, tl.full((BLOCK_W,), 0x01010101, tl.int32), total, 0, USE_ASM)
        pairs = _with(pairs, pair)
    if SYMMETRIC:
        total *= -(1 << (BITS - 1))
    return pairs, total, unit


@triton.constexpr_function
def _code(BITS: int, k: int) -> int:
    """Return the first code of pair k: codes of 4 bits become bytes of every second one, so the next is the one after it."""
    return 2 * k if BITS == 8 else k % 2 * 4 + k // 2


@triton.jit
def _larger(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Return the larger of two values, NaN if one is NaN."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _products(
    tile: tl.tuple, inputs: tl.tuple, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, USE_ASM: tl.constexpr
) -> tl.tensor:
    """Return the products of a tile and its inputs, summed over each four words: float32 [rows, words / 4]."""
    codes, scales = tile[0], tile[1]
    pairs, total, unit = inputs
    products = tl.zeros(codes.shape, tl.int32)
    if SYMMETRIC:
        products += total[None, :]
    for k in tl.static_range(16 // BITS):
        octets = codes
        if BITS == 4:
            octets = (codes >> (k // 2 * 4)) & 0x0F0F0F0F
        products = _add_products(pairs[k][None, :], octets, products, k % 2, USE_ASM)
    sums = tl.sum(tl.reshape(products, (codes.shape[0], codes.shape[1] // 4, 4)), axis=2).to(tl.float32)
    if not SYMMETRIC:
        totals = tl.sum(tl.reshape(total, (codes.shape[1] // 4, 4)), axis=1)
        sums -= tile[2].to(tl.float32) * totals[None, :].to(tl.float32)
    return sums * unit[None, :] * scales.to(tl.float32)


@triton.jit
def _add_products(
    pair: tl.tensor, octets: tl.tensor, total: tl.tensor, HIGH: tl.constexpr, USE_ASM: tl.constexpr
) -> tl.tensor:
    """Return total + pair · two bytes without sign: the lower two, or the higher two if HIGH."""
    if USE_ASM:
        code: tl.constexpr = "dp2a.hi.s32.u32 $0, $1, $2, $3;" if HIGH else "dp2a.lo.s32.u32 $0, $1, $2, $3;"
        arguments = [pair, octets, total]
        return tl.inline_asm_elementwise(code, "=r,r,r,r", arguments, dtype=tl.int32, is_pure=True, pack=1)
    low, high = (octets >> (16 * HIGH)) & 0xFF, (octets >> (16 * HIGH + 8)) & 0xFF
    return total + ((pair << 16) >> 16) * low + (pair >> 16) * high


@triton.jit
def _store(  # noqa: PLR0913 – called from a kernel only
    out: tl.tensor,
    bias: tl.tensor | None,
    result: tl.tensor,
    own: tl.tensor,
    columns: int,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Store the results of a block of outputs from `own` on."""
    first, rows = _rows(own, columns, PARTS, BLOCK_N)
    if bias is not None:
        result += tl.load(bias + first + rows).to(tl.float32)
    if KIND is not None:
        gate, up = tl.split(tl.reshape(result, (BLOCK_N, 2)))
        result = activated(gate, KIND) * up
    column = first + tl.arange(0, BLOCK_N)
    if SCALE != 1.0:
        result *= SCALE
    if ADD:
        result += tl.load(out + column, mask=column >= own, other=0.0)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column >= own)
