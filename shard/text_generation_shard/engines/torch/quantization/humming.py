"""y = x·Wᵀ + b by humming-kernels: packed weights of 4 and 8 bits, activations in the model's dtype.

humming compiles a kernel for each shape and format when it is first called, into the folder HUMMING_CACHE_DIR (default
~/.humming/cache). Its kernels can be captured in CUDA graphs. Called as batch-invariant: a row of the result depends neither on
the other rows nor on the run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.model.linear import Projection, bias_parameters
from text_generation_shard.engines.torch.parameter import PackedSource, ParameterShard
from text_generation_shard.engines.torch.quantization.format import WeightFormat
from text_generation_shard.engines.torch.quantization.formats.awq import AwqFormat
from text_generation_shard.engines.torch.quantization.formats.float4 import MXFP4_GROUP, Mxfp4Format
from text_generation_shard.engines.torch.quantization.formats.float8 import Fp8BlockFormat
from text_generation_shard.engines.torch.quantization.formats.gptq import GptqFormat
from text_generation_shard.engines.torch.quantization.formats.integers import WORD_BITS, packed
from text_generation_shard.engines.torch.quantization.formats.packed_integers import PackedIntegerFormat

IntegerFormat = GptqFormat | AwqFormat | PackedIntegerFormat
INTEGER_FORMATS = (GptqFormat, AwqFormat, PackedIntegerFormat)
COMPUTE_CONFIG = json.dumps({"use_batch_invariant": True})
OUTPUT_MULTIPLE, INPUT_MULTIPLE = 64, 32
"""Multiples of the sizes of a weight that its layout needs."""
MIN_CAPABILITY = (8, 0)


@functools.cache
def is_installed() -> bool:
    return find_spec("humming") is not None


def bits_and_group(weights: WeightFormat | None) -> tuple[int, int] | None:
    """Return the bits of a weight and the inputs of a group (0: all), if humming multiplies with this format."""
    if isinstance(weights, INTEGER_FORMATS) and not (isinstance(weights, GptqFormat) and weights.desc_act):
        return (4 if isinstance(weights, AwqFormat) else weights.bits), max(weights.group_size, 0)
    if isinstance(weights, Fp8BlockFormat):
        return 8, weights.block[1]
    if isinstance(weights, Mxfp4Format):
        return 4, MXFP4_GROUP
    return None


def can_multiply(projections: Sequence[Projection], weights: WeightFormat | None, device: torch.device) -> bool:
    """Return True if humming is installed and multiplies these projections on the device."""
    found = bits_and_group(weights)
    if found is None or device.type != "cuda" or not is_installed():
        return False
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return False
    inputs, group = projections[0].inputs, found[1] or 1
    outputs = [projection.outputs for projection in projections]
    return (
        sum(part.length for part in outputs) % OUTPUT_MULTIPLE == 0
        and all(part.length % 8 == 0 and part.start % 8 == 0 for part in outputs)
        and inputs.length % INPUT_MULTIPLE == 0
        and inputs.start % max(group, INPUT_MULTIPLE) == 0
        and inputs.length % group == 0
    )


class HummingLinear:
    """Fused projections in a packed format: weights int32 [outputs, inputs·bits/32] until they are processed."""

    def __init__(
        self,
        projections: Sequence[Projection],
        weights: WeightFormat,
        device: torch.device,
        dtype: torch.dtype,
        *,
        bias: bool,
    ) -> None:
        from humming.layer import HummingLayer

        found = bits_and_group(weights)
        assert found is not None
        self.projections = tuple(projections)
        self._weights, (self._bits, self._group) = weights, found
        self._inputs = projections[0].inputs
        with torch.device(device):
            self._layer = HummingLayer(
                shape_n=sum(projection.outputs.length for projection in projections),
                shape_k=self._inputs.length,
                weight_config=_config(weights, self._bits, self._group, dtype),
                torch_dtype=dtype,
                has_bias=bias,
            )
        self.weight: Tensor = self._layer.weight.data
        self.bias: Tensor | None = self._layer.bias.data if bias else None

    def named_parameters(self) -> dict[str, ParameterShard]:
        layer, group = self._layer, self._group or self._inputs.length
        parameters = self._parts("weight", self.weight, self._codes, WORD_BITS // self._bits)
        parameters |= self._parts("weight_scale", layer.weight_scale.data, self._scales, group)
        if hasattr(layer, "zero_point"):
            parameters |= self._parts("weight_zero_point", layer.zero_point.data, self._zeros, group)
        return parameters | bias_parameters(self.projections, self.bias)

    def process_weights_after_loading(self) -> None:
        """Reorder the weights for the kernels."""
        self._layer.transform()
        self.weight = self._layer.weight.data

    def pack(self) -> None:
        """Nothing to reorder: there is none of these on a CPU."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return y [rows, outputs] for x [rows, inputs] in the model's dtype, written to `out` if given."""
        from humming.layer import HummingLayerMethod

        y: Tensor = HummingLayerMethod.forward_layer(self._layer, x, outputs=out, compute_config=COMPUTE_CONFIG)
        return y

    def without_invariance(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute the same by kernels whose sums depend on the number of rows and on the run; for comparison."""
        from humming.layer import HummingLayerMethod

        y: Tensor = HummingLayerMethod.forward_layer(self._layer, x, outputs=out)
        return y

    def _parts(
        self,
        kind: str,
        fused: Tensor,
        read: Callable[[Mapping[str, Tensor], slice], Tensor],
        columns: int,
    ) -> dict[str, ParameterShard]:
        """Return the rows of a fused tensor that has one column for `columns` inputs."""
        per_row = sum(projection.outputs.length for projection in self.projections) // fused.shape[0]
        lengths = [projection.outputs.length // per_row for projection in self.projections]
        return {
            f"{projection.name}.{kind}": ParameterShard(
                rows,
                (projection.outputs.total // per_row, max(1, projection.inputs.total // columns)),
                (projection.outputs.start // per_row, projection.inputs.start // columns),
                PackedSource(f"{projection.name}.weight", projection.shape, read),
            )
            for projection, rows in zip(self.projections, torch.split(fused, lengths), strict=True)
        }

    def _columns(self) -> slice:
        return slice(self._inputs.start, self._inputs.start + self._inputs.length)

    def _groups(self) -> slice:
        if not self._group:
            return slice(0, 1)
        return slice(self._inputs.start // self._group, (self._inputs.start + self._inputs.length) // self._group)

    def _codes(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Return rows of packed codes."""
        weights, columns = self._weights, self._columns()
        if isinstance(weights, INTEGER_FORMATS):
            integers = weights.integers(tensors, (rows, columns))
            if weights.symmetric and not (torch.as_tensor(integers.zeros) == 1 << (self._bits - 1)).all():
                raise EngineError(f"{weights.label}: zero points are not in the middle, and the config says symmetric")
            return packed(integers.codes, self._bits, 1)
        bytes_per_word, per_byte = WORD_BITS // 8, 8 // self._bits
        stored = tensors["packed" if "packed" in tensors else "weight"][rows]
        stored = stored[:, columns.start // per_byte : columns.stop // per_byte].contiguous()
        assert stored.shape[1] % bytes_per_word == 0
        return stored.view(torch.int32)

    def _scales(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Return rows of scales by group."""
        weights, groups = self._weights, self._groups()
        if isinstance(weights, INTEGER_FORMATS):
            return weights.integers(tensors, (rows, self._columns())).scales[:, groups]
        if isinstance(weights, Fp8BlockFormat):
            blocks = torch.arange(rows.start, rows.stop) // weights.block[0]
            return tensors["scale"].float()[blocks][:, groups]
        return tensors["scale"][rows, groups].view(torch.float8_e8m0fnu)

    def _zeros(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Return zero points by group, packed along the outputs."""
        assert isinstance(self._weights, INTEGER_FORMATS)
        per_word = WORD_BITS // self._bits
        outputs = slice(rows.start * per_word, rows.stop * per_word)
        zeros = self._weights.integers(tensors, (outputs, self._columns())).zeros
        assert isinstance(zeros, Tensor)
        if int(zeros.max()) >> self._bits:
            raise EngineError(f"{self._weights.label}: a zero point is {int(zeros.max())}, more than a code")
        return packed(zeros[:, self._groups()], self._bits, 0)


def _config(weights: WeightFormat, bits: int, group: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return humming's description of a format."""
    own = str(dtype).removeprefix("torch.")
    if isinstance(weights, INTEGER_FORMATS):
        symmetric = weights.symmetric
        return {"dtype": f"uint{bits}", "group_size": group, "scale_dtype": own, "has_zero_point": not symmetric}
    if isinstance(weights, Fp8BlockFormat):
        return {"dtype": "float8e4m3", "group_size": group, "scale_dtype": own}
    return {"dtype": "float4e2m1", "group_size": group, "scale_dtype": "float8e8m0"}
