"""Products of the CUDA path: fused projections with and without bias, and the LM head."""

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


def random_linear(device: torch.device, precision: Precision, *, bias: bool) -> ParallelLinear:
    linear = ParallelLinear(PROJECTIONS, device, precision, bias=bias)
    linear.weight.normal_()
    if linear.bias is not None:
        linear.bias.normal_()
    return linear


def reference(linear: ParallelLinear, x: torch.Tensor) -> torch.Tensor:
    bias = 0 if linear.bias is None else linear.bias.double()
    return x.double() @ linear.weight.double().t() + bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_the_output_is_new_or_the_given_tensor(device: torch.device, dtype: torch.dtype, bias: bool) -> None:
    linear = random_linear(device, Precision(dtype, dtype, dtype), bias=bias)
    x = torch.randn(5, 40, device=device, dtype=dtype)
    assert error(linear(x), reference(linear, x)) < ROUNDING[dtype]
    buffer = torch.full((9, 32), float("nan"), device=device, dtype=dtype)
    returned = linear(x, buffer[:5])
    assert error(buffer[:5], reference(linear, x)) < ROUNDING[dtype]
    assert returned.data_ptr() == buffer.data_ptr()
    assert buffer[5:].isnan().all()


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_output_may_be_float32(device: torch.device, bias: bool, converted: bool) -> None:
    linear = random_linear(device, Precision(torch.bfloat16, torch.float32, torch.bfloat16), bias=bias)
    if converted:
        linear.weight = linear.weight.to(torch.float16)
    x = torch.randn(5, 40, device=device).to(linear.weight.dtype)
    out = torch.full((5, 32), float("nan"), device=device)
    for product in (linear(x), linear(x, out), out):
        assert product.dtype == torch.float32
        assert error(product, reference(linear, x)) < 1e-5


def test_named_parameters_are_the_rows_of_each_projection(device: torch.device) -> None:
    linear = ParallelLinear(PROJECTIONS, device, Precision(*[torch.float32] * 3), bias=True)
    parameters = linear.named_parameters()
    assert list(parameters) == ["a.weight", "b.weight", "a.bias", "b.bias"]
    assert (parameters["b.weight"].shape, parameters["b.weight"].starts) == ((16, 40), (8, 0))
    assert (parameters["b.bias"].shape, parameters["b.bias"].starts) == ((16,), (8,))
    linear.weight.zero_()
    parameters["b.weight"].tensor.fill_(1.0)
    assert linear.weight.sum(1).tolist() == [0.0] * 24 + [40.0] * 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_float32(device: torch.device, dtype: torch.dtype) -> None:
    head = LMHead(torch.randn(51, 64, device=device).to(dtype))
    x = torch.randn(3, 64, device=device).to(dtype)
    reference = x.double() @ head.weight.double().t()
    out = torch.full((3, 51), float("nan"), device=device)
    for logits in (head.logits(x), head.logits(x, out), out):
        assert logits.dtype == torch.float32
        assert error(logits, reference) < 1e-5
