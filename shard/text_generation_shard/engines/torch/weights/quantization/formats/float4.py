"""4-bit floating-point weights (E2M1, two in a byte, the lower bits first): MXFP4 and NVFP4.

MXFP4 (OCP Microscaling Formats 1.0) has a power of two for 32 inputs, stored as its exponent plus 127. NVFP4 has a factor in
float8_e4m3fn for 16 inputs and one in float32 for the tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.weights.quantization.format import (
    StoredTensor,
    UnsupportedSchemeError,
    WeightFormat,
    two_dimensions,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code."""
_PAIRS = torch.tensor([(E2M1[byte & 0xF], E2M1[byte >> 4]) for byte in range(256)])
"""The two values of each byte."""
MXFP4_GROUP, NVFP4_GROUP = 32, 16
EXPONENT_BIAS = 127
BYTES = (torch.uint8,)


@dataclass(frozen=True, slots=True)
class Mxfp4Format(WeightFormat):
    """MXFP4 of compressed-tensors: `weight_packed` uint8 [outputs, inputs/2], `weight_scale` uint8 [outputs, inputs/32]."""

    label = "MXFP4"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        outputs, inputs = _grouped(name, shape, MXFP4_GROUP)
        return {
            "packed": StoredTensor((f"{name}_packed",), ((outputs, inputs // 2),), BYTES),
            "scale": StoredTensor((f"{name}_scale",), ((outputs, inputs // MXFP4_GROUP),), BYTES),
        }

    def dequantize(self, tensors: Mapping[str, Tensor], ranges: Sequence[slice]) -> Tensor:
        rows, columns = ranges
        return _mxfp4(tensors["packed"][rows], tensors["scale"][rows], columns)


@dataclass(frozen=True, slots=True)
class GptOssMxfp4Format(WeightFormat):
    """MXFP4 of gpt-oss: experts whose weights are [experts, inputs, outputs].

    `NAME_blocks` uint8 [experts, outputs, inputs/32, 16], `NAME_scales` uint8 [experts, outputs, inputs/32].
    """

    label = "MXFP4 experts"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        if len(shape) != 3 or shape[1] % MXFP4_GROUP:
            raise UnsupportedSchemeError(f"{name} of shape {list(shape)} cannot be MXFP4 experts")
        experts, inputs, outputs = shape
        scales = (experts, outputs, inputs // MXFP4_GROUP)
        return {
            "blocks": StoredTensor((f"{name}_blocks",), ((*scales, MXFP4_GROUP // 2),), BYTES),
            "scales": StoredTensor((f"{name}_scales",), (scales,), BYTES),
        }

    def dequantize(self, tensors: Mapping[str, Tensor], ranges: Sequence[slice]) -> Tensor:
        experts, inputs, outputs = ranges
        blocks, scales = tensors["blocks"][experts, outputs], tensors["scales"][experts, outputs]
        return _mxfp4(blocks.flatten(2), scales, inputs).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Nvfp4Format(WeightFormat):
    """NVFP4 of compressed-tensors and ModelOpt. Activations are not quantized.

    compressed-tensors: `weight_packed` uint8 [outputs, inputs/2], `weight_scale` [outputs, inputs/16]; w = q · (s / global_scale),
    rounded to bfloat16. ModelOpt: the packed tensor is `weight`; w = q · (s · weight_scale_2).
    """

    modelopt: bool

    label = "NVFP4"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        outputs, inputs = _grouped(name, shape, NVFP4_GROUP)
        packed, whole = (name, f"{name}_scale_2") if self.modelopt else (f"{name}_packed", f"{name}_global_scale")
        scales = (outputs, inputs // NVFP4_GROUP)
        return {
            "packed": StoredTensor((packed,), ((outputs, inputs // 2),), BYTES),
            "scale": StoredTensor((f"{name}_scale",), (scales,), (torch.float8_e4m3fn,)),
            "whole": StoredTensor((whole,), ((), (1,)), (torch.float32,)),
        }

    def check(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
        if not float(tensors["whole"]) > 0:
            raise UnsupportedSchemeError(f"the scale of the tensor is {float(tensors['whole'])}, not above 0")

    def dequantize(self, tensors: Mapping[str, Tensor], ranges: Sequence[slice]) -> Tensor:
        rows, columns = ranges
        scales, whole = tensors["scale"][rows].float(), tensors["whole"].reshape(1)
        scales = scales * whole if self.modelopt else scales / whole
        weight = _values(tensors["packed"][rows], columns) * _of_columns(scales, columns, NVFP4_GROUP)
        return weight if self.modelopt else weight.to(torch.bfloat16)


def _grouped(name: str, shape: tuple[int, ...], size: int) -> tuple[int, int]:
    outputs, inputs = two_dimensions(name, shape)
    if inputs % size:
        raise UnsupportedSchemeError(f"{name} has {inputs} inputs, not a multiple of {size}")
    return outputs, inputs


def _mxfp4(packed: Tensor, scales: Tensor, columns: slice) -> Tensor:
    """Return a range of the last dimension in bfloat16, which holds each product exactly."""
    exponents = _of_columns(scales, columns, MXFP4_GROUP).int() - EXPONENT_BIAS
    return torch.ldexp(_values(packed, columns), exponents).to(torch.bfloat16)


def _values(packed: Tensor, columns: slice) -> Tensor:
    """Return the values of a range of the last dimension, which has two codes in a byte; float32."""
    first, last = columns.start // 2, -(-columns.stop // 2)
    pairs = packed[..., first:last]
    values = _PAIRS.index_select(0, pairs.flatten().int()).view(*pairs.shape[:-1], -1)
    return values[..., columns.start - 2 * first :][..., : columns.stop - columns.start]


def _of_columns(scales: Tensor, columns: slice, size: int) -> Tensor:
    """Return the scale of each column."""
    return scales.index_select(-1, torch.arange(columns.start, columns.stop) // size)
