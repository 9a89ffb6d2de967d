"""y = x·Wᵀ + b by humming-kernels: packed weights of 4 and 8 bits, activations in the model's dtype.

humming compiles kernels for each shape and format when it is first called, into the folder HUMMING_CACHE_DIR (default
~/.humming/cache): on an H200, 47 s for an 8B model, 0.6 s for each product from the cache. They can be captured in CUDA graphs.

Measured on an H200, the products of a layer of an 8B model in int4 have 2.01, 1.85, 1.14, 0.89 and 0.96 times the speed of cuBLAS in
bfloat16 at 1, 32, 128, 256 and 2,048 rows. The small ones, of queries, keys and values and of the output, are slower from about 100
rows on (0.87, 0.79 and 0.88): those are computed by cuBLAS with a dequantized copy. Integers have a second copy, in the order of
our own kernel for a few rows, which is fused with the operations next to it: see kernels/packed_matvec.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.device import compute_capability
from text_generation_shard.engines.torch.kernels.packed_weight import PackedWeight
from text_generation_shard.engines.torch.model.linear import Projection, bias_parameters
from text_generation_shard.engines.torch.parameter import PackedSource, ParameterShard
from text_generation_shard.engines.torch.quantization.format import WeightFormat
from text_generation_shard.engines.torch.quantization.formats.awq import AwqFormat
from text_generation_shard.engines.torch.quantization.formats.float4 import E2M1, MXFP4_GROUP, Mxfp4Format
from text_generation_shard.engines.torch.quantization.formats.float8 import FP8, Fp8BlockFormat
from text_generation_shard.engines.torch.quantization.formats.gptq import GptqFormat
from text_generation_shard.engines.torch.quantization.formats.integers import WORD_BITS, packed, unpacked
from text_generation_shard.engines.torch.quantization.formats.packed_integers import PackedIntegerFormat

if TYPE_CHECKING:
    from humming.config import LayerConfig

INTEGER_FORMATS = (GptqFormat, AwqFormat, PackedIntegerFormat)
MAX_ROWS, MAX_COPIED = 96, 1 << 25
"""Rows from which on a dequantized copy is faster, for weights of at most MAX_COPIED values; larger ones have no copy."""
FREE_FOR_CACHE = 0.5
"""Share of the device's memory that copies for our own kernel leave free."""
INVARIANT = json.dumps({"use_batch_invariant": True})
"""The option that makes a row of a result independent of the other rows: half as fast at one row, so only measured."""
OUTPUT_MULTIPLE, INPUT_MULTIPLE = 64, 32
"""Multiples of the sizes of a weight that its layout needs."""
MIN_CAPABILITY, HOPPER = (8, 0), (9, 0)
FEW_ROWS, WIDE_OUTPUTS = (16, 32), 1 << 14
"""Rows for which humming chooses a slower tiling on an H200, of weights of 4 bits: 83 against 65 µs for the products of a layer of
an 8B model at 32 rows. Weights with many outputs are fastest with wide tiles."""


@functools.cache
def is_installed() -> bool:
    return find_spec("humming") is not None


def bits_and_group(weights: WeightFormat | None) -> tuple[int, int] | None:
    """Return the bits of a weight and the inputs of a group (0: all), if humming multiplies with this format."""
    if isinstance(weights, INTEGER_FORMATS) and (isinstance(weights, AwqFormat) or not weights.desc_act):
        return (4 if isinstance(weights, AwqFormat) else weights.bits), max(weights.group_size, 0)
    if isinstance(weights, Fp8BlockFormat):
        return 8, weights.block[1]
    if isinstance(weights, Mxfp4Format):
        return 4, MXFP4_GROUP
    return None


def can_multiply(projections: Sequence[Projection], weights: WeightFormat | None, device: torch.device) -> bool:
    """Return True if humming is installed and multiplies these projections on the device."""
    found = bits_and_group(weights)
    if found is None or device.type == "cpu" or not is_installed():
        return False
    if compute_capability(device) < MIN_CAPABILITY:
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

        self.projections = tuple(projections)
        self._weights, (self._bits, self._group) = weights, _bits_and_group(weights)
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
        self._dense: Tensor | None = None
        self.matvec_weight: PackedWeight | None = None
        self._tilings: str | None = None

    def named_parameters(self) -> dict[str, ParameterShard]:
        layer, group = self._layer, self._group or self._inputs.total
        parameters = self._parts("weight", self.weight, packed_codes, WORD_BITS // self._bits)
        parameters |= self._parts("weight_scale", layer.weight_scale.data, packed_scales, group)
        if hasattr(layer, "zero_point"):
            parameters |= self._parts("weight_zero_point", layer.zero_point.data, packed_zeros, group)
        return parameters | bias_parameters(self.projections, self.bias)

    def process_weights_after_loading(self) -> None:
        """Copy a small weight, dequantized, and integers for our own kernel; reorder the packed weight for humming's."""
        layer = self._layer
        scales = layer.weight_scale.data
        zeros = layer.zero_point.data if hasattr(layer, "zero_point") else None
        if layer.shape_n * layer.shape_k <= MAX_COPIED:
            self._dense = dense_weight(self._weights, self.weight, scales, zeros).to(layer.torch_dtype)
        if isinstance(self._weights, INTEGER_FORMATS) and has_room(self.weight.device):
            points = None if zeros is None else unpacked(zeros, self._bits, 0)
            self.matvec_weight = PackedWeight.of(self.weight, scales, points, self._bits)
        layer.transform()
        self.weight = layer.weight.data
        if torch.cuda.get_device_capability(self.weight.device) == HOPPER:
            self._tilings = tilings(layer.humming_config, self._bits)

    def pack(self) -> None:
        """Nothing to reorder: there is none of these on a CPU."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return y [rows, outputs] for x [rows, inputs] in the model's dtype, written to `out` if given."""
        if self._dense is None or x.shape[0] < MAX_ROWS:
            return self.packed_product(x, out)
        if self.bias is None:
            return torch.mm(x, self._dense.t(), out=out)
        return torch.addmm(self.bias, x, self._dense.t(), out=out)

    def packed_product(
        self, x: Tensor, out: Tensor | None, options: str | None = None, tiling: str | None = None
    ) -> Tensor:
        """Compute the product with the packed weight at any number of rows, with humming's options or another tiling."""
        from humming.layer import HummingLayerMethod

        if options is None and tiling is None:
            tiling = self._tilings
        y: Tensor = HummingLayerMethod.forward_layer(
            self._layer, x, outputs=out, compute_config=options, tuning_config=tiling
        )
        return y

    def _parts(
        self,
        kind: str,
        fused: Tensor,
        read: Callable[[WeightFormat, Mapping[str, Tensor], slice, slice], Tensor],
        columns: int,
    ) -> dict[str, ParameterShard]:
        """Return the rows of a fused tensor that has one column for `columns` inputs."""
        inputs = slice(self._inputs.start, self._inputs.start + self._inputs.length)
        per_row = sum(projection.outputs.length for projection in self.projections) // fused.shape[0]
        lengths = [projection.outputs.length // per_row for projection in self.projections]
        return {
            f"{projection.name}.{kind}": ParameterShard(
                rows,
                (projection.outputs.total // per_row, projection.inputs.total // columns),
                (projection.outputs.start // per_row, projection.inputs.start // columns),
                PackedSource(
                    f"{projection.name}.weight",
                    projection.shape,
                    lambda tensors, rows: read(self._weights, tensors, rows, inputs),
                ),
            )
            for projection, rows in zip(self.projections, torch.split(fused, lengths), strict=True)
        }


@functools.cache
def tilings(config: LayerConfig, bits: int) -> str:
    """Return humming's tilings by the number of rows, with better ones where they were measured.

    All kernels are launched with programmatic dependent launch: see kernels/pdl.py.
    """
    from humming.tune import get_heuristics_config

    found = []
    for first, last, own in get_heuristics_config(config):
        tiling = own
        if bits == 4 and FEW_ROWS[0] < last <= FEW_ROWS[1] and config.shape_n % 256 == 0 and config.shape_k % 64 == 0:
            is_wide = config.shape_n >= WIDE_OUTPUTS
            tiling = {
                "mma_type": "wgmma",
                "block_shape": (last, 256 if is_wide else 128, 64),
                "warp_shape": (last, 32, 64),
                "num_stages": 6 if is_wide else 4,
                "num_ctas_per_sm": 2,
                "use_warp_spec": True,
                "use_tma": True,
            }
        found.append((first, last, tiling | {"use_pdl": True}))
    return json.dumps(found)


def has_room(device: torch.device) -> bool:
    """Return True if there is memory for further copies of weights: the KV cache needs the rest."""
    free, total = torch.cuda.mem_get_info(device)
    return free >= FREE_FOR_CACHE * total


def packed_codes(weights: WeightFormat, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:
    """Return codes packed along the inputs: int32 [rows, columns·bits/32]."""
    bits, _ = _bits_and_group(weights)
    if isinstance(weights, INTEGER_FORMATS):
        if weights.symmetric and not (weights.zeros(tensors, rows) == 1 << (bits - 1)).all():
            raise EngineError(f"{weights.label}: zero points are not in the middle, and the config says symmetric")
        if not isinstance(weights, AwqFormat) and weights.order(tensors) is not None:
            raise EngineError(f"{weights.label}: the groups of inputs are not in order, contrary to the config")
        if isinstance(weights, PackedIntegerFormat):
            per_word = WORD_BITS // bits
            return tensors["packed"][rows, columns.start // per_word : columns.stop // per_word]
        return packed(weights.codes(tensors, rows, columns), bits, 1)
    per_byte = 8 // bits
    stored = tensors["packed" if "packed" in tensors else "weight"][rows]
    stored = stored[:, columns.start // per_byte : columns.stop // per_byte]
    return stored.flatten().view(torch.int32).view(len(stored), -1)


def packed_scales(weights: WeightFormat, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:
    """Return scales [rows, groups]."""
    groups = _groups(weights, columns)
    if isinstance(weights, INTEGER_FORMATS):
        return weights.scales(tensors, rows)[:, groups]
    if isinstance(weights, Fp8BlockFormat):
        return tensors["scale"].float()[torch.arange(rows.start, rows.stop) // weights.block[0]][:, groups]
    return tensors["scale"][rows, groups].view(torch.float8_e8m0fnu)


def packed_zeros(weights: WeightFormat, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:
    """Return zero points packed along the outputs: int32 [rows, groups], with 32 / bits outputs in a row."""
    assert isinstance(weights, INTEGER_FORMATS)
    bits, _ = _bits_and_group(weights)
    outputs = slice(rows.start * (WORD_BITS // bits), rows.stop * (WORD_BITS // bits))
    zeros = weights.zeros(tensors, outputs)[:, _groups(weights, columns)]
    if int(zeros.max()) >> bits:
        raise EngineError(f"{weights.label}: a zero point is {int(zeros.max())}, more than a code")
    return packed(zeros, bits, 0)


def dense_weight(weights: WeightFormat, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return the weight [outputs, inputs] in float32 from the packed tensors."""
    bits, _ = _bits_and_group(weights)
    inputs = codes.shape[1] * (WORD_BITS // bits)
    factors = scales.float().repeat_interleave(inputs // scales.shape[1], 1)
    if isinstance(weights, Fp8BlockFormat):
        return codes.view(FP8).float() * factors
    values = unpacked(codes, bits, 1)
    if isinstance(weights, Mxfp4Format):
        return torch.tensor(E2M1, device=codes.device)[values.int()] * factors
    if zeros is None:
        return (values.float() - (1 << (bits - 1))) * factors
    return (values.float() - unpacked(zeros, bits, 0).repeat_interleave(inputs // scales.shape[1], 1)) * factors


def _bits_and_group(weights: WeightFormat) -> tuple[int, int]:
    found = bits_and_group(weights)
    assert found is not None
    return found


def _groups(weights: WeightFormat, columns: slice) -> slice:
    """Return the groups of a range of inputs that begins and ends with a group."""
    _, group = _bits_and_group(weights)
    return slice(columns.start // group, columns.stop // group) if group else slice(0, 1)


def _config(weights: WeightFormat, bits: int, group: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return humming's description of a format."""
    own = str(dtype).removeprefix("torch.")
    if isinstance(weights, INTEGER_FORMATS):
        symmetric = weights.symmetric
        return {"dtype": f"uint{bits}", "group_size": group, "scale_dtype": own, "has_zero_point": not symmetric}
    if isinstance(weights, Fp8BlockFormat):
        return {"dtype": "float8e4m3", "group_size": group, "scale_dtype": own}
    return {"dtype": "float4e2m1", "group_size": group, "scale_dtype": "float8e8m0"}
