"""Products of packed codes and x in float16, two at a time, for packed_matvec.py.

A mask or a conversion of the hardware makes numbers in float16 of two codes at once: of integers of 4 bits, code · 2^-24 or 2^-20,
which have no exponent; of E2M1, code · 2^-14; of E4M3, the code. x is scaled by a power of two for each four words, so that its
largest value is as large as float16 allows: values in float16 and bfloat16 stay exact, down to 2^-28 of the largest, with E4M3 to
2^-17. Eight or sixteen products are added in float16, which has 11 significant bits, and these sums in float32. For random x and
weights the error of the sums is 0.0012 of a result with integers, 0.0006 with E2M1 and 0.0004 with E4M3; rounding a result to bfloat16
has one of 0.0017.
"""

# ruff: noqa: N806, RUF005 – kernel constants are in capitals, as usual in Triton, which joins tuples by +
from __future__ import annotations

import triton
import triton.language as tl

_SMALLEST = tl.constexpr(64)
"""The least biased exponent of float32 that x is scaled for."""

_SUM_OF_WORDS = """{{
.reg .b32 a, b, sums;
.reg .b16 low, high;
.reg .f32 second;
mov.b32 sums, 0;
{products}
mov.b32 {{low, high}}, sums;
cvt.f32.f16 $0, low;
cvt.f32.f16 second, high;
add.f32 $0, $0, second;
}}"""


def _assembly(products_of_word: str, pairs: int) -> tl.constexpr:
    """Return the code that sums the products of four words: operands 1 to 4, then `pairs` pairs of x for each."""
    products = []
    for word in range(4):
        operands = {f"x{pair}": f"${5 + pairs * word + pair}" for pair in range(pairs)}
        products.append(products_of_word.format(word=f"${1 + word}", **operands))
    return tl.constexpr(_SUM_OF_WORDS.format(products="".join(products)))


_INTEGERS = _assembly(
    """
and.b32 a, {word}, 0x000F000F;
fma.rn.f16x2 sums, a, {x0}, sums;
and.b32 a, {word}, 0x00F000F0;
fma.rn.f16x2 sums, a, {x1}, sums;
shr.b32 b, {word}, 8;
and.b32 a, b, 0x000F000F;
fma.rn.f16x2 sums, a, {x2}, sums;
and.b32 a, b, 0x00F000F0;
fma.rn.f16x2 sums, a, {x3}, sums;
""",
    4,
)
# The sign of a code goes to bit 15 or 31, its other bits to 9 to 11 or 25 to 27.
_E2M1 = _assembly(
    "".join(
        f"""
sh{direction}.b32 a, {{word}}, {places};
shl.b32 b, {{word}}, {12 - 4 * pair};
and.b32 b, b, 0x80008000;
lop3.b32 a, a, 0x0E000E00, b, 0xea;
fma.rn.f16x2 sums, a, {{x{pair}}}, sums;
"""
        for pair, (direction, places) in enumerate((("l", 9), ("l", 5), ("l", 1), ("r", 3)))
    ),
    4,
)
_E4M3 = _assembly(
    """
mov.b32 {{low, high}}, {word};
cvt.rn.f16x2.e4m3x2 a, low;
fma.rn.f16x2 sums, a, {x0}, sums;
cvt.rn.f16x2.e4m3x2 a, high;
fma.rn.f16x2 sums, a, {x1}, sums;
""",
    2,
)


@triton.constexpr_function
def half_unit(BITS: int, FLOATS: bool) -> float:  # noqa: FBT001 – as called in a kernel
    """Return the factor of the sums that `sums_of_halves` returns."""
    return 2.0 ** (3 if BITS == 8 else 0 if FLOATS else -10)


@triton.jit
def sums_of_halves(words: tl.tensor, values: tl.tuple, BITS: tl.constexpr, FLOATS: tl.constexpr) -> tl.tensor:
    """Return the sums of code · x over each four words, float32 [rows, words / 4], times `half_unit`.

    `words` [rows, words]; `values`: x of code j of each word, float32 [words], for each j. Codes are integers of 4 bits, or floats.
    """
    PAIRS: tl.constexpr = 16 // BITS
    # The codes of pair p that one instruction takes: p and p + 4 of eight, 2·p and 2·p + 1 of four.
    STEP: tl.constexpr = 1 if BITS == 4 else 2
    APART: tl.constexpr = 4 if BITS == 4 else 1
    largest = tl.abs(values[0])
    for j in tl.static_range(1, 2 * PAIRS):
        largest = tl.maximum(largest, tl.abs(values[j]))
    largest = tl.max(tl.reshape(largest, (words.shape[1] // 4, 4)), axis=1)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, _SMALLEST)
    # The largest is at least 2^14 then, or 2^3: eight products with 448 are less than 65,504.
    factor = (((257 if BITS == 8 else 268) - exponent) << 23).to(tl.float32, bitcast=True)
    fours = ()
    for j in tl.static_range(2 * PAIRS):
        fours = fours + (_fours(values[j]),)  # type: ignore[assignment]
    operands = _fours(words)
    for word in tl.static_range(4):
        for pair in tl.static_range(PAIRS):
            first: tl.tensor = fours[STEP * pair][word]
            second: tl.tensor = fours[STEP * pair + APART][word]
            own = factor * 0.0625 if BITS == 4 and not FLOATS and pair % 2 == 1 else factor
            operands = operands + (_halves(first * own, second * own)[None, :],)
    sums = tl.inline_asm_elementwise(
        _E4M3 if BITS == 8 else _E2M1 if FLOATS else _INTEGERS,
        "=f" + ",r" * (4 + 4 * PAIRS),
        operands,
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    return sums * (exponent << 23).to(tl.float32, bitcast=True)[None, :]


@triton.jit
def _halves(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Return two numbers in float16 in a word, the first in its low half."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [first, second], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _fours(values: tl.tensor) -> tl.tuple:
    """Return each first, second, third and fourth of four values of the last axis."""
    even, odd = tl.split(tl.reshape(values, values.shape[:-1] + (values.shape[-1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
