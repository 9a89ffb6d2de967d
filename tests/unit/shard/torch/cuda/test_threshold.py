"""The threshold search kernel, compared with a sort in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels import threshold
from text_generation_shard.engines.torch.kernels.threshold import kth_largest, smallest_set_threshold


def sorted_threshold(keys: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """Return the threshold by its definition."""
    ordered, order = keys.sort(-1, descending=True)
    reached = weights.double().gather(1, order).cumsum(-1) >= mass
    first = torch.where(reached.any(-1), reached.int().argmax(-1), keys.shape[1] - 1)
    return ordered.gather(1, first.unsqueeze(1))


def some_keys(n: int, scale: float, device: torch.device) -> Tensor:
    """Return four rows; one is half −inf, one has many ties."""
    keys = torch.randn(4, n, generator=torch.Generator().manual_seed(n)) * scale
    keys[1, ::2] = -torch.inf
    keys[2] = keys[2].mul(2).round()
    return keys.to(device)


def column(*values: float, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)


FULL_BUFFER = threshold.CAPACITY


@pytest.mark.parametrize(
    ("n", "scale", "capacity"),
    [
        *((1, 3.0, FULL_BUFFER), (7, 3.0, FULL_BUFFER), (2500, 3.0, FULL_BUFFER), (2500, 0.01, FULL_BUFFER)),
        *((1500, 0.01, 1), (1500, 0.01, 500)),  # more keys than fit the buffer
    ],
)
def test_the_smallest_set_of_a_given_mass(
    n: int, scale: float, capacity: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threshold, "CAPACITY", capacity)
    keys = 1 + some_keys(n, scale, device)
    weights = keys.softmax(-1)
    mass = column(0.25, 0.9, 0.6, 0.999, device=device)
    assert torch.equal(smallest_set_threshold(keys, weights, mass), sorted_threshold(keys, weights, mass))


def test_weights_independent_of_the_keys_and_an_unreachable_mass(device: torch.device) -> None:
    keys = some_keys(1300, 3.0, device)
    weights = torch.rand(keys.shape, generator=torch.Generator().manual_seed(1)).to(device)
    weights[weights < 0.5] = 0.0
    for mass in (column(1e-9, 40.0, 300.0, 1.0, device=device), column(2e3, 2e3, torch.inf, 2e3, device=device)):
        assert torch.equal(smallest_set_threshold(keys, weights, mass), sorted_threshold(keys, weights, mass))


def test_the_kth_largest_of_strided_rows(device: torch.device) -> None:
    keys = torch.full((4, 2524), torch.nan, device=device)[:, :2500]
    keys.copy_(some_keys(2500, 3.0, device))
    k = torch.tensor([[1], [2500], [700], [50]], device=device)
    assert torch.equal(kth_largest(keys, k), keys.sort(-1, descending=True).values.gather(1, k - 1))


def test_a_row_of_nan_terminates_and_does_not_affect_others(device: torch.device) -> None:
    keys = some_keys(300, 3.0, device)
    keys[0] = torch.nan
    weights = keys.softmax(-1)
    mass = column(0.5, 0.5, 0.5, 0.5, device=device)
    found = smallest_set_threshold(keys, weights, mass)
    assert torch.equal(found[1:], sorted_threshold(keys[1:], weights[1:], mass[1:]))
