"""Quantizes rows of activations to float8_e4m3fn, with the largest value of each row or a fixed scale.

One program per row. The row stays in registers between the maximum and the scaling.
"""

import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.rows import row_tile
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import FP8_MAX, MIN_SCALE

_ELEMENTS_PER_THREAD = 16


def quantize_rows(x: Tensor, out: Tensor, scales: Tensor, fixed: Tensor | None = None) -> None:
    """out = x / scale, rounded to FP8 and clamped to ±448; `scales` receives the factors that dequantize `out`.

    `x` [rows, columns] in any float dtype, `out` float8_e4m3fn of its shape, `scales` float32 [rows, 1]. The scale is
    max |x| / 448 of the row, or `fixed` (float32 [1]) for all rows. With dynamic scales, rows with NaN or infinity become NaN;
    with a fixed scale, NaN is kept and infinity clamped.
    """
    rows, columns = x.shape
    block, num_warps = row_tile(columns, _ELEMENTS_PER_THREAD)
    _quantize_kernel[(rows,)](
        x,
        out,
        scales,
        fixed,
        x.stride(0),
        out.stride(0),
        COLUMNS=columns,
        BLOCK=block,
        FP8_MAX=FP8_MAX,
        MIN_SCALE=MIN_SCALE,
        num_warps=num_warps,
    )


@triton.jit
def _quantize_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    fixed: tl.tensor | None,
    x_stride: int,
    out_stride: int,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if fixed is None:
        # As integers: NaN is then the largest, whereas a maximum of floats would drop it.
        bits = tl.max(tl.abs(values).to(tl.int32, bitcast=True))
        largest = bits.to(tl.float32, bitcast=True)
        scale = tl.maximum(largest / FP8_MAX, MIN_SCALE, propagate_nan=tl.PropagateNan.ALL)
    else:
        scale = tl.load(fixed)
    tl.store(scales + row, scale)
    scaled = tl.clamp(values / scale, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * out_stride + columns, scaled.to(tl.float8e4nv), mask=inside)
