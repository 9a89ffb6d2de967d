"""Products of some rows in FP8, where cuBLAS does not read the weight at the speed of the device.

y[t, n] = x_scale[t] · w_scale[n] · Σ x8[t, k] · w8[n, k] (+ bias[n]), summed as `FAST_ACCUMULATION` in layers/quantized/fp8.py says. The weight is the left operand: tensor cores
want 64 rows there, and few tokens are enough on the right.
"""

import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.rows import is_on_hopper

_BLOCK_N, _BLOCK_K = 64, 256
FEW_ROWS = 64
MORE_ROWS, MORE_OUTPUTS = 128, 1 << 13
"""Rows, and outputs of weights with more rows, up to which the kernel is faster. Measured on an H200 with the products of an 8B
model: 72 instead of 114 µs a layer at 32 rows."""


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Return True if the kernel is faster than `torch._scaled_mm` for `x` [rows, inputs] and `weight` [outputs, inputs]."""
    rows, (outputs, inputs) = len(x), weight.shape
    most = MORE_ROWS if outputs <= MORE_OUTPUTS else FEW_ROWS
    return rows <= most and inputs % _BLOCK_K == 0 and is_on_hopper(x)


def fp8_product(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Write the product to `out` [rows, outputs], in any float dtype.

    `x` [rows, inputs] and `weight` [outputs, inputs] are float8_e4m3fn and contiguous, inputs a multiple of 256; `x_scales` float32
    [rows, 1], `weight_scales` float32 [1, outputs], `bias` [outputs].
    """
    rows, (outputs, inputs) = len(x), weight.shape
    _product_kernel[(triton.cdiv(outputs, _BLOCK_N),)](
        x,
        x_scales,
        weight,
        weight_scales,
        bias,
        out,
        rows,
        out.stride(0),
        INPUTS=inputs,
        OUTPUTS=outputs,
        BLOCK_M=max(triton.next_power_of_2(rows), 16),
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
        num_stages=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    rows: int,
    out_stride: int,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tokens, inputs = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    is_token = tokens < rows
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(columns, OUTPUTS - 1)
    x_at = x + tokens[:, None] * INPUTS + inputs[None, :]
    weight_at = weight + read.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in range(0, INPUTS, BLOCK_K):
        some = tl.load(x_at, mask=is_token[:, None], other=0.0)
        sums = tl.dot(tl.load(weight_at), tl.trans(some), sums)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    sums *= tl.load(weight_scales + read)[:, None]
    sums *= tl.load(x_scales + tokens, mask=is_token, other=0.0)[None, :]
    if bias is not None:
        sums += tl.load(bias + read).to(tl.float32)[:, None]
    out_at = out + tokens[:, None] * out_stride + columns[None, :]
    tl.store(out_at, tl.trans(sums.to(out.dtype.element_ty)), mask=is_token[:, None] & (columns < OUTPUTS)[None, :])
