"""Rows as sums of two numbers of 8 bits, as the product of panels of experts reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.expert_panels import SplitRows, split_rows
from text_generation_shard.engines.torch.kernels.operands import GatedActivation


def joined(rows: SplitRows) -> Tensor:
    high, low = rows.values.float()
    return (high + low / 16) * rows.scales[:, None]


def test_numbers_in_bfloat16_are_split_exactly(device: torch.device) -> None:
    x = torch.randn(7, 200, device=device, dtype=torch.bfloat16) * torch.logspace(-20, 20, 7, device=device)[:, None]
    x = x.to(torch.bfloat16)
    x = x.where(x.abs() > x.abs().amax(1, keepdim=True) * 2**-13, 0)
    x[3] = 0
    found = joined(split_rows(x))
    assert torch.equal(found[:, :200], x.float())
    assert not found[:, 200:].any()


def test_small_numbers_beside_a_large_one_are_rounded(device: torch.device) -> None:
    x = torch.full((1, 128), 1e-5, device=device, dtype=torch.bfloat16)
    x[0, 7] = 1
    error = (joined(split_rows(x)) - x.float()).abs().max()
    assert 0 < error <= 2**-21


@pytest.mark.parametrize("interleaved", [False, True])
def test_activations_with_the_bias_of_the_expert_are_split(device: torch.device, interleaved: bool) -> None:
    activation = GatedActivation("clamped_swiglu", interleaved=interleaved)
    x, bias = (torch.randn(count, 192, device=device, dtype=torch.bfloat16) for count in (6, 3))
    ends = torch.tensor([2, 2, 6], dtype=torch.int32, device=device)
    expected = activation(x.float() + bias[[0, 0, 2, 2, 2, 2]].float())
    found = joined(split_rows(x, bias, ends, activation))[:, :96]
    assert (found - expected).norm() < 4e-3 * expected.norm()
    assert torch.equal(found, found.to(torch.bfloat16).float())
