"""The products of a mixture of experts with packed weights, by humming-kernels.

One kernel multiplies the rows of each expert, which are next to each other, with the expert's weight. Weights are in the formats of
`HummingLinear` and in MXFP4 as gpt-oss stores it.
"""

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.packed_weight import PackedWeight
from text_generation_shard.engines.torch.layers.linear import Projection
from text_generation_shard.engines.torch.layers.quantized.humming import has_matvec_copy, matvec_copy
from text_generation_shard.engines.torch.layers.quantized.packed_format import (
    packed_parameters,
    packed_tensors,
    weight_config,
)
from text_generation_shard.engines.torch.weights.parameter import ParameterShard
from text_generation_shard.engines.torch.weights.quantization.format import WeightFormat
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import GptOssMxfp4Format

if TYPE_CHECKING:
    from humming.config import LayerConfig

OUTPUT_PADDING, INPUT_PADDING = 256, 64
"""Outputs and inputs of a weight are padded to multiples of these, for which humming has fast tilings."""
GEMM_TYPE = "grouped_contiguous"
GROUPED = json.dumps({"gemm_type": GEMM_TYPE})
MAX_ROWS = 1 << 16
"""The most rows for which humming chooses a tiling of its own."""


class HummingExperts:
    """A product with one packed weight for each expert."""

    def __init__(
        self, experts: Sequence[Sequence[Projection]], weights: WeightFormat, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`experts` has the projections of each expert, which are fused; all have the same sizes."""
        from humming.layer import HummingLayer

        self._experts, self._weights = experts, weights
        self._tilings = ""
        self.matvec_weight: PackedWeight | None = None
        with torch.device(device):
            self._layer = HummingLayer(
                shape_n=sum(projection.outputs.length for projection in experts[0]),
                shape_k=experts[0][0].inputs.length,
                weight_config=weight_config(weights, dtype),
                num_experts=len(experts),
                torch_dtype=dtype,
                pad_n_to_multiple=OUTPUT_PADDING,
                pad_k_to_multiple=INPUT_PADDING,
            )

    def named_parameters(self) -> dict[str, ParameterShard]:
        parameters: dict[str, ParameterShard] = {}
        tensors = packed_tensors(self._layer)
        stacked = isinstance(self._weights, GptOssMxfp4Format)
        for expert, projections in enumerate(self._experts):
            own = {name: tensor[expert] for name, tensor in tensors.items()}
            place = (expert, len(self._experts)) if stacked else None
            parameters |= packed_parameters(projections, self._weights, own, place)
        return parameters

    def process_weights_after_loading(self) -> None:
        """Copy the weights for our own kernel of a few rows; reorder them for humming's."""
        if has_matvec_copy(self._experts[0], self._layer.weight.device):
            tensors = {name: tensor.flatten(0, 1) for name, tensor in packed_tensors(self._layer).items()}
            stored = tensors["weight"], tensors["weight_scale"], tensors.get("zero_point")
            self.matvec_weight = matvec_copy(self._weights, *stored)
        self._layer.transform()
        self._tilings = tilings(self._layer.humming_config)

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return y [rows, outputs] for x [rows, inputs]; `offsets`, int32 [experts + 1], has the first row of each expert."""
        from humming.layer import HummingLayerMethod

        y: Tensor = HummingLayerMethod.forward_layer(
            self._layer, x, expert_layout=offsets, compute_config=GROUPED, tuning_config=self._tilings
        )
        return y


@functools.cache
def tilings(config: "LayerConfig") -> str:
    """Return humming's tilings for powers of two of rows: each is compiled, and to find all that it knows takes minutes."""
    from humming.tune import get_heuristics_config

    ends = [1 << exponent for exponent in range(MAX_ROWS.bit_length())]
    found = [
        (end // 2, 1 << 30 if end == MAX_ROWS else end, get_heuristics_config(config, shape_m=end, gemm_type=GEMM_TYPE))
        for end in ends
    ]
    return json.dumps(found)
