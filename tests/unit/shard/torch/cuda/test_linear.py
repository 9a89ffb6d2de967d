"""Products of the CUDA path: fused, with and without a bias, and the head's in float32."""

from __future__ import annotations

import pytest
import torch

from text_generation_shard.engines.torch.cuda.linear import LMHead, ParallelLinear, Projection, ShardRange
from text_generation_shard.engines.torch.cuda.precision import Precision

PROJECTIONS = [
    Projection("a", ShardRange.whole(24), ShardRange.whole(40)),
    Projection("b", ShardRange(8, 8, 16), ShardRange.whole(40)),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_goes_where_it_is_told_or_to_a_new_tensor(
    device: torch.device, dtype: torch.dtype, bias: bool
) -> None:
    linear = ParallelLinear(PROJECTIONS, device, Precision(dtype, dtype, dtype), bias=bias)
    linear.weight.normal_()
    if linear.bias is not None:
        linear.bias.normal_()
    x = torch.randn(5, 40, device=device, dtype=dtype)
    reference = x.double() @ linear.weight.double().t() + (0 if linear.bias is None else linear.bias.double())
    assert error(linear(x), reference) < ROUNDING[dtype]
    buffer = torch.full((9, 32), float("nan"), device=device, dtype=dtype)
    returned = linear(x, buffer[:5])
    assert error(buffer[:5], reference) < ROUNDING[dtype]
    assert returned.data_ptr() == buffer.data_ptr()
    assert buffer[5:].isnan().all()


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_may_be_left_in_float32(device: torch.device, bias: bool, converted: bool) -> None:
    linear = ParallelLinear(PROJECTIONS, device, Precision(torch.bfloat16, torch.float32, torch.bfloat16), bias=bias)
    linear.weight.normal_()
    if linear.bias is not None:
        linear.bias.normal_()
    if converted:
        linear.weight = linear.weight.to(torch.float16)
    x = torch.randn(5, 40, device=device).to(linear.weight.dtype)
    reference = x.double() @ linear.weight.double().t() + (0 if linear.bias is None else linear.bias.double())
    out = torch.full((5, 32), float("nan"), device=device)
    for product in (linear(x), linear(x, out), out):
        assert product.dtype == torch.float32
        assert error(product, reference) < 1e-5


def test_targets_are_the_rows_of_each_projection(device: torch.device) -> None:
    linear = ParallelLinear(PROJECTIONS, device, Precision(*[torch.float32] * 3), bias=True)
    targets = linear.named_parameters()
    assert list(targets) == ["a.weight", "b.weight", "a.bias", "b.bias"]
    assert (targets["b.weight"].shape, targets["b.weight"].starts) == ((16, 40), (8, 0))
    assert (targets["b.bias"].shape, targets["b.bias"].starts) == ((16,), (8,))
    linear.weight.zero_()
    targets["b.weight"].tensor.fill_(1.0)
    assert linear.weight.sum(1).tolist() == [0.0] * 24 + [40.0] * 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_not_rounded_to_the_dtype_of_the_weights(device: torch.device, dtype: torch.dtype) -> None:
    head = LMHead(torch.randn(51, 64, device=device).to(dtype))
    x = torch.randn(3, 64, device=device).to(dtype)
    reference = x.double() @ head.weight.double().t()
    out = torch.full((3, 51), float("nan"), device=device)
    for logits in (head.logits(x), head.logits(x, out), out):
        assert logits.dtype == torch.float32
        assert error(logits, reference) < 1e-5
