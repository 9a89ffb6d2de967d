"""Chooses the linear layer of projections by the format of their weights."""

from collections.abc import Sequence

import torch

from text_generation_shard.engines.torch.layers.linear import Projection
from text_generation_shard.engines.torch.layers.quantized import humming
from text_generation_shard.engines.torch.layers.quantized.fp8 import Fp8Linear, can_multiply
from text_generation_shard.engines.torch.layers.quantized.humming import HummingExperts, HummingLinear
from text_generation_shard.engines.torch.layers.quantized.packed_format import bits_and_group
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import Fp8Format
from text_generation_shard.engines.torch.weights.quantization.schemes import Scheme

QuantizedLinear = Fp8Linear | HummingLinear


def quantized_linear(
    projections: Sequence[Projection], scheme: Scheme | None, device: torch.device, dtype: torch.dtype, *, bias: bool
) -> QuantizedLinear | None:
    """Return the layer of fused projections that computes with quantized weights.

    None if no layer does: the weights are then in the model's dtype, and dequantized when they are loaded.
    """
    if scheme is None:
        return None
    weights, *others = {scheme.format_of(projection.name) for projection in projections}
    if others or weights is None:
        return None
    if isinstance(weights, Fp8Format) and not weights.weight_only and can_multiply(projections, device):
        return Fp8Linear(projections, weights, device, dtype, bias=bias)
    if not scheme.online and humming.can_multiply(projections, weights, device):
        return HummingLinear(projections, weights, device, dtype, bias=bias)
    return None


def quantized_experts(
    products: Sequence[Sequence[Sequence[Projection]]],
    scheme: Scheme | None,
    device: torch.device,
    dtype: torch.dtype,
    kept_bytes: int | None,
) -> list[HummingExperts] | None:
    """Return the layer of each product of a mixture, which multiplies with packed weights; None as for `quantized_linear`.

    A product has the fused projections of each expert. `kept_bytes`: see `has_copy`.
    """
    if scheme is None or scheme.online:
        return None
    every = [projections for experts in products for projections in experts]
    weights, *others = {scheme.format_of(projection.name) for projections in every for projection in projections}
    if others or weights is None or not all(humming.can_multiply(each, weights, device, padded=True) for each in every):
        return None
    return [HummingExperts(experts, weights, device, dtype, kept_bytes) for experts in products]


def projection_itemsize(scheme: Scheme | None, itemsize: int) -> float:
    """Return the bytes of a weight of a projection on a GPU, in the smallest format; `itemsize` is the model's dtype."""
    if scheme is None:
        return itemsize
    sizes: list[float] = []
    for _, weights in scheme.rules:
        found = bits_and_group(weights) if humming.is_installed() else None
        is_fp8 = isinstance(weights, Fp8Format) and not weights.weight_only
        sizes.append(1 if is_fp8 else found[0] / 8 if found else itemsize)
    return min(sizes, default=itemsize)
