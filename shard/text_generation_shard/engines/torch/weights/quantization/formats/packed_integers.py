"""The integer formats of compressed-tensors: `pack-quantized` and `int-quantized`.

`pack-quantized` packs codes, larger by 2^(bits − 1) than the signed values, along the inputs: `weight_packed` int32
[outputs, ⌈inputs·bits/32⌉], and zero points along the outputs: `weight_zero_point` int32 [⌈outputs·bits/32⌉, groups].
`weight_scale` is [outputs, groups]. `int-quantized` has a signed `weight` int8 [outputs, inputs] and signed zero points.
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
    group_index,
    groups_of,
    two_dimensions,
)
from text_generation_shard.engines.torch.weights.quantization.formats.gptq import check_groups
from text_generation_shard.engines.torch.weights.quantization.formats.integers import (
    WORD_BITS,
    GroupedIntegers,
    dequantized,
    middle,
    unpacked_range,
)


@dataclass(frozen=True, slots=True)
class PackedIntegerFormat(GroupedIntegers):
    """The format `pack-quantized`."""

    @property
    def label(self) -> str:
        return f"compressed-tensors int{self.bits} g{self.group_size}"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        outputs, inputs = two_dimensions(name, shape)
        groups = groups_of(inputs, self.group_size)
        words = (torch.int32,)
        index = (torch.int32, torch.int64)
        stored = {
            "packed": StoredTensor((f"{name}_packed",), ((outputs, self._words(inputs)),), words),
            "scale": StoredTensor((f"{name}_scale",), ((outputs, groups),), WIDE),
            "shape": StoredTensor((f"{name}_shape",), ((2,),), index, optional=True),
            "g_idx": StoredTensor((f"{name}_g_idx",), ((inputs,),), index, optional=True),
        }
        if not self.symmetric:
            stored["zero_point"] = StoredTensor((f"{name}_zero_point",), ((self._words(outputs), groups),), words)
        return stored

    def check(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
        if "shape" in tensors and tuple(tensors["shape"].tolist()) != shape:
            raise UnsupportedSchemeError(f"weight_shape is {tensors['shape'].tolist()}, config.json says {list(shape)}")
        check_groups(self.order(tensors), tensors["scale"].shape[1], "weight_g_idx")

    def codes(self, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:
        return unpacked_range(tensors["packed"][rows], self.bits, 1, columns)

    def zeros(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        if self.symmetric:
            return middle(self.bits, self.scales(tensors, rows))
        return unpacked_range(tensors["zero_point"], self.bits, 0, rows)

    def scales(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        return tensors["scale"][rows]

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return the group of each input; None if they are in order. -1 everywhere, the initial value, means that they are."""
        g_idx = tensors.get("g_idx")
        return None if g_idx is None or bool((g_idx == -1).all()) else g_idx

    def _words(self, length: int) -> int:
        return -(-length * self.bits // WORD_BITS)


@dataclass(frozen=True, slots=True)
class Int8Format(WeightFormat):
    """The format `int-quantized`: bytes that are not packed."""

    group_size: int
    """Inputs per group; -1: all, one scale per output; 0: one scale for all outputs."""
    symmetric: bool

    label = "compressed-tensors int8"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        outputs, inputs = two_dimensions(name, shape)
        shapes: tuple[tuple[int, ...], ...] = ((1,), (1, 1))
        if self.group_size:
            shapes = ((outputs, groups_of(inputs, self.group_size)),)
        stored = {
            "weight": StoredTensor((name,), (shape,), (torch.int8,)),
            "scale": StoredTensor((f"{name}_scale",), shapes, WIDE),
        }
        if not self.symmetric:
            stored["zero_point"] = StoredTensor((f"{name}_zero_point",), shapes, (torch.int8,))
        return stored

    def dequantize(self, tensors: Mapping[str, Tensor], ranges: Sequence[slice]) -> Tensor:
        rows, columns = ranges
        outputs = tensors["weight"].shape[0]

        def of_rows(values: Tensor) -> Tensor:
            return values.reshape(-1, values.shape[-1]).expand(outputs, -1)[rows]

        scales = of_rows(tensors["scale"])
        return dequantized(
            tensors["weight"][rows, columns].to(torch.int16),
            torch.zeros_like(scales, dtype=torch.int16)
            if self.symmetric
            else of_rows(tensors["zero_point"]).to(torch.int16),
            scales,
            group_index(columns, self.group_size or -1),
        )
