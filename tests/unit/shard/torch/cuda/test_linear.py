"""Products of the CUDA path: fused projections with and without bias."""

from __future__ import annotations

import pytest
import torch
from reference_ops import relative_error as error

from text_generation_shard.engines.torch.layers.linear import ParallelLinear, Projection
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange

PROJECTIONS = [
    Projection("a", ShardRange.whole(24), ShardRange.whole(40)),
    Projection("b", ShardRange(8, 8, 16), ShardRange.whole(40)),
]
BF16 = torch.bfloat16
ROUNDING = {BF16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}


def random_linear(device: torch.device, precision: Precision, *, bias: bool) -> ParallelLinear:
    linear = ParallelLinear(PROJECTIONS, device, precision, bias=bias)
    linear.weight.normal_()
    if linear.bias is not None:
        linear.bias.normal_()
    return linear


def reference(linear: ParallelLinear, x: torch.Tensor) -> torch.Tensor:
    bias = 0 if linear.bias is None else linear.bias.double()
    return x.double() @ linear.weight.double().t() + bias


@pytest.mark.parametrize(
    ("model", "products", "weight", "limit"),
    [
        *((dtype, dtype, dtype, limit) for dtype, limit in ROUNDING.items()),
        *((BF16, torch.float32, weight, 1e-5) for weight in (BF16, torch.float16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_output_is_new_or_the_given_tensor(
    device: torch.device, model: torch.dtype, products: torch.dtype, weight: torch.dtype, limit: float, bias: bool
) -> None:
    linear = random_linear(device, Precision(model, products, model), bias=bias)
    linear.weight = linear.weight.to(weight)
    x = torch.randn(5, 40, device=device).to(weight)
    buffer = torch.full((9, 32), float("nan"), device=device, dtype=products)
    for product in (linear(x), linear(x, buffer[:5]), buffer[:5]):
        assert product.dtype == products
        assert error(product, reference(linear, x)) < limit
    assert linear(x, buffer[:5]).data_ptr() == buffer.data_ptr()
    assert buffer[5:].isnan().all()
