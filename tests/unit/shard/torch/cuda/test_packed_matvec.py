"""Products of packed integers with a few rows, compared with their formulas in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from full_grid import full
from reference_ops import activate, dequantized, relative_error, rms_norm, rounded_once
from torch import Tensor

from text_generation_shard.engines.torch.kernels.matvec import matvec
from text_generation_shard.engines.torch.kernels.operands import ChosenExperts, GatedActivation
from text_generation_shard.engines.torch.kernels.packed_matvec import PackedConfig, packed_matvec
from text_generation_shard.engines.torch.kernels.packed_weight import PackedWeight
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import E2M1
from text_generation_shard.engines.torch.weights.quantization.formats.integers import packed

EPS = 1e-5
HALF_ERROR = 1e-2
"""The largest error of sums in float16, see half_products.py, with which a gate may be near zero."""


@dataclass(frozen=True)
class Case:
    """A weight of random codes."""

    bits: int
    group: int
    outputs: int
    inputs: int
    zeros: bool
    floats: bool = False

    def weight(self, device: torch.device, dtype: torch.dtype) -> tuple[PackedWeight, Tensor]:
        """Return the weight, and its values in float64."""
        codes = torch.randint(1 << self.bits, (self.outputs, self.inputs), device=device)
        if self.floats:
            return self.of_floats(codes)
        groups = self.outputs, self.inputs // self.group
        zeros = torch.randint(1 << self.bits, groups, device=device).to(torch.uint8) if self.zeros else None
        scales = (torch.rand(groups, device=device) / 100 + 0.001).to(dtype)
        weight = PackedWeight.of(packed(codes, self.bits, 1), scales, zeros, self.bits)
        assert weight is not None
        middle = 1 << (self.bits - 1) if zeros is None else zeros.double().repeat_interleave(self.group, 1)
        return weight, (codes - middle) * scales.double().repeat_interleave(self.group, 1)

    def of_floats(self, codes: Tensor) -> tuple[PackedWeight, Tensor]:
        """Return a weight of E4M3 or E2M1 codes."""
        if self.bits == 8:
            codes = codes.where(codes % 128 != 127, 0)  # NaN
            values = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
        else:
            values = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)[codes]
        factors = torch.rand(self.outputs, self.inputs // self.group, device=codes.device) / 1000
        weight = PackedWeight.of(packed(codes, self.bits, 1), factors, None, self.bits, floats=True)
        assert weight is not None
        return weight, values * factors.double().repeat_interleave(self.group, 1)


CASES = [
    Case(4, 128, 10, 1792, zeros=False),  # parts of a row that are not full
    Case(4, 32, 10, 512, zeros=True),
    Case(8, 64, 10, 512, zeros=True),
    Case(8, 128, 10, 512, zeros=False, floats=True),
    full(Case(4, 32, 10, 288, zeros=False, floats=True)),
    full(Case(4, 96, 6, 288, zeros=False)),  # no power of two
    full(Case(8, 1024, 6, 1024, zeros=False)),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case.bits} bits, groups of {case.group}" + ", floats" * case.floats)
def weights(request: pytest.FixtureRequest, device: torch.device, dtype: torch.dtype) -> tuple[PackedWeight, Tensor]:
    """A packed weight, and its values."""
    found: tuple[PackedWeight, Tensor] = request.param.weight(device, dtype)
    return found


def normal(like: PackedWeight, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=like.words.device).to(dtype)


def is_close(out: Tensor, product: Tensor) -> bool:
    """Return True if the product is rounded once, or on a GPU near to it."""
    return rounded_once(out, product) or (out.is_cuda and relative_error(out, product) < HALF_ERROR)


def test_a_packed_weight_stands_for_its_values(weights: tuple[PackedWeight, Tensor]) -> None:
    weight, values = weights
    assert torch.equal(dequantized(weight), values.float())


def test_the_products_of_chosen_experts(weights: tuple[PackedWeight, Tensor], dtype: torch.dtype) -> None:
    """The weight's rows are those of two experts; gpt-oss interleaves gate and up."""
    weight, values = weights
    outputs, inputs = weight.shape[0] // 2, weight.shape[1]
    if outputs % 2:
        outputs -= 1
        weight, values = replace(weight, words=weight.words[: 2 * outputs]), values[: 2 * outputs]
    experts = ChosenExperts(torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=values.device), 2, 2)
    x, bias = normal(weight, 2, inputs, dtype=dtype), normal(weight, 2 * outputs, dtype=dtype)
    out = x.new_full((4, outputs), torch.nan)
    product = (x.double() @ values.T + bias.double()).view(2, 2, -1)[[0, 0, 1, 1], experts.ids.long()]
    matvec(x, weight, out, bias, experts=experts)
    assert is_close(out, product)
    inner, swiglu = x.new_full((4, outputs // 2), torch.nan), GatedActivation("clamped_swiglu", interleaved=True)
    matvec(x, weight, inner, bias, activation=swiglu, experts=experts)
    assert is_close(inner, swiglu(product))


def test_the_product_with_norm_activation_and_sum(weights: tuple[PackedWeight, Tensor], dtype: torch.dtype) -> None:
    weight, values = weights
    outputs, inputs = weight.shape
    residual, norm_weight = 7 * normal(weight, 2, inputs), normal(weight, inputs, dtype=dtype)
    bias = normal(weight, outputs, dtype=dtype)
    out, inner = (residual.new_full((2, width), torch.nan, dtype=dtype) for width in (outputs, outputs // 2))
    product = rms_norm(residual.double(), norm_weight.double(), EPS) @ values.T + bias.double()
    matvec(residual, weight, out, bias, norm=(norm_weight, EPS))
    assert is_close(out, product)
    matvec(residual, weight, inner, bias, norm=(norm_weight, EPS), activation=GatedActivation("silu"))
    assert is_close(inner, activate(product, "silu"))
    x, sums = normal(weight, 2, inputs, dtype=dtype), normal(weight, 2, outputs)
    product = (x.double() @ values.T + bias.double()) * 0.3
    expected = sums.double() + product
    matvec(x, weight, sums, bias, add=True, scale=0.3)
    assert is_close(sums, expected)
    matvec(x, weight, out, bias, scale=0.3)
    assert is_close(out, product)


@pytest.mark.parametrize("size", [1e-12, 1e9], ids=["tiny", "huge"])
def test_no_size_of_the_inputs_loses_precision(device: torch.device, dtype: torch.dtype, size: float) -> None:
    weight, values = Case(4, 128, 4, 512, zeros=False).weight(device, dtype)
    x, out = normal(weight, 1, 512) * size, torch.empty(1, 4, device=device)
    for each in (x, x.bfloat16()):
        matvec(each, weight, out)
        assert is_close(out, each.double() @ values.T)


def test_all_tilings_agree(device: torch.device, dtype: torch.dtype) -> None:
    weight, values = Case(4, 128, 12, 2304, zeros=False).weight(device, dtype)
    x = normal(weight, 1, 2304, dtype=dtype)
    for config in (PackedConfig(1, 1, 1), PackedConfig(8, 1, 2), PackedConfig(2, 4, 4), PackedConfig(4, 2, 1)):
        out = torch.full((1, 12), torch.nan, device=device)
        packed_matvec(x, weight, out, config=config)
        assert is_close(out, x.double() @ values.T), config


def test_groups_that_no_load_divides_are_not_packed(device: torch.device) -> None:
    words, scales = torch.zeros(8, 6, dtype=torch.int32, device=device), torch.ones(8, 3, device=device)
    assert PackedWeight.of(words, scales, None, 4) is None
