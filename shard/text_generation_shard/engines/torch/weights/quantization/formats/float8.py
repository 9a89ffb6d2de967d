"""FP8 weights in float8_e4m3fn, with a scale per tensor, per output or per block of outputs and inputs.

The methods `fp8` (transformers, Qwen, DeepSeek, Mistral), `compressed-tensors` and `modelopt` differ in the names of the scales
and in the dtype of the product: float32, or with compressed-tensors that of the scales.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.weights.quantization.format import (
    WIDE,
    StoredTensor,
    UnsupportedSchemeError,
    WeightFormat,
    two_dimensions,
)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest finite number of float8_e4m3fn (Micikevicius et al. 2022, arXiv 2209.05433)."""
MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
"""Scale of a row of zeros, as in vLLM. 1/512 is the smallest number of FP8."""
SCALE_SUFFIXES = ("_scale", "_scale_inv")


@dataclass(frozen=True, slots=True)
class Fp8Format(WeightFormat):
    """One scale per tensor or per output: what `Fp8Linear` multiplies with."""

    scale_per_row: bool
    """True: a weight_scale for each row of a weight (shape [outputs, 1]). False: one for the tensor."""
    static_inputs: bool
    """True: activations are scaled by the checkpoint's input_scale. False: each token by its own largest value."""
    in_scale_dtype: bool = False
    """True: dequantized weights are products in the dtype of the scales, as compressed-tensors defines them."""
    weight_only: bool = False
    """True: activations are not quantized, so that the product is not one of FP8."""

    @property
    def label(self) -> str:
        return "FP8 by row" if self.scale_per_row else "FP8 by tensor"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        outputs, _ = two_dimensions(name, shape)
        shapes = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        return {
            "weight": StoredTensor((name,), (shape,), (FP8,)),
            "scale": StoredTensor(tuple(name + suffix for suffix in SCALE_SUFFIXES), shapes, WIDE),
        }

    def dequantize(self, tensors: Mapping[str, Tensor], ranges: Sequence[slice]) -> Tensor:
        rows, columns = ranges
        weight, scale = tensors["weight"], tensors["scale"]
        dtype = scale.dtype if self.in_scale_dtype else torch.float32
        factors = scale.to(dtype).reshape(-1, 1).expand(weight.shape[0], 1)[rows]
        return weight[rows, columns].to(dtype) * factors


def row_scales(weight: Tensor) -> Tensor:
    """Return the scales that quantize the rows of a weight: [rows, 1], float32."""
    return (weight.float().abs().amax(1, keepdim=True) / FP8_MAX).clamp_min_(MIN_SCALE)


def quantized_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight in float8_e4m3fn, divided by `row_scales`, and these."""
    scales = row_scales(weight)
    return (weight.float() / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


@dataclass(frozen=True, slots=True)
class Fp8BlockFormat(WeightFormat):
    """One scale per block of outputs and inputs; the last blocks may be smaller."""

    block: tuple[int, int]
    in_scale_dtype: bool = False

    @property
    def label(self) -> str:
        return f"FP8 by block of {self.block[0]} × {self.block[1]}"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        sizes = zip(two_dimensions(name, shape), self.block, strict=True)
        blocks = tuple(-(-length // size) for length, size in sizes)
        return {
            "weight": StoredTensor((name,), (shape,), (FP8,)),
            "scale": StoredTensor((f"{name}_scale_inv", f"{name}_scale"), (blocks,), (*WIDE, torch.float8_e8m0fnu)),
        }

    def dequantize(self, tensors: Mapping[str, Tensor], ranges: Sequence[slice]) -> Tensor:
        scale = tensors["scale"]
        dtype = scale.dtype if self.in_scale_dtype else torch.float32
        factors = scale.to(dtype)
        for dim, (part, size) in enumerate(zip(ranges, self.block, strict=True)):
            factors = factors.index_select(dim, torch.arange(part.start, part.stop) // size)
        return tensors["weight"][ranges[0], ranges[1]].to(dtype).mul_(factors)


def read_block(key: str, given: object) -> tuple[int, int]:
    """Return the outputs and inputs of a block. Raises UnsupportedSchemeError, naming `key`."""
    sizes = given if isinstance(given, list | tuple) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= 1 << 20 for size in sizes):
        raise UnsupportedSchemeError(f"{key} is {str(given)[:50]}, not two positive numbers")
    return sizes[0], sizes[1]
