"""Chooses the linear layer of projections by the format of their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from text_generation_shard.engines.torch.model.linear import Projection
from text_generation_shard.engines.torch.quantization import humming
from text_generation_shard.engines.torch.quantization.formats.float8 import Fp8Format
from text_generation_shard.engines.torch.quantization.fp8 import Fp8Linear, can_multiply
from text_generation_shard.engines.torch.quantization.humming import HummingLinear
from text_generation_shard.engines.torch.quantization.schemes import Scheme

QuantizedLinear = Fp8Linear | HummingLinear


def quantized_linear(
    projections: Sequence[Projection], scheme: Scheme | None, device: torch.device, dtype: torch.dtype, *, bias: bool
) -> QuantizedLinear | None:
    """Return the layer of fused projections that computes with quantized weights.

    None if there is none: the weights are then in the model's dtype, and dequantized when they are loaded.
    """
    if scheme is None:
        return None
    weights, *others = {scheme.format_of(projection.name) for projection in projections}
    if others or weights is None:
        return None
    if isinstance(weights, Fp8Format) and not weights.weight_only and can_multiply(projections, device):
        return Fp8Linear(projections, weights, device, dtype, bias=bias)
    if humming.can_multiply(projections, weights, device):
        return HummingLinear(projections, weights, device, dtype, bias=bias)
    return None


def projection_itemsize(scheme: Scheme | None, itemsize: int) -> float:
    """Return the bytes of a weight of a projection on a GPU, in the smallest format; `itemsize` is the model's dtype."""
    if scheme is None:
        return itemsize
    sizes: list[float] = []
    for _, weights in scheme.rules:
        found = humming.bits_and_group(weights) if humming.is_installed() else None
        is_fp8 = isinstance(weights, Fp8Format) and not weights.weight_only
        sizes.append(1 if is_fp8 else found[0] / 8 if found else itemsize)
    return min(sizes)
