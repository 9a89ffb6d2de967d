"""Copies of blocks between device and host, and the sums of their words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.host_copy import BlockCopies

WIDTHS = 2500, 17
"""Words of the parts of a block."""


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("is_load", [False, True], ids=["store", "load"])
def test_blocks_are_copied_and_summed_and_others_stay(is_load: bool, dtype: torch.dtype, device: torch.device) -> None:
    def host_memory(values: Tensor) -> Tensor:
        return values.pin_memory() if device.type == "cuda" else values

    host = host_memory(numbers(dtype, 7, sum(WIDTHS)))
    wide = [numbers(dtype, 40, width + 3).to(device) for width in WIDTHS]
    parts = [each[:, :width] for each, width in zip(wide, WIDTHS, strict=True)]
    factors = numbers(torch.int64, sum(WIDTHS)).to(device)
    before, blocks_before = host.clone(), torch.cat(parts, dim=1)
    on_device, on_host = torch.tensor([33, 2, 0]), torch.tensor([6, 0, 3])
    sums = BlockCopies(host, parts, factors).copy(host_memory(on_device), host_memory(on_host), is_load=is_load)
    source = before[on_host] if is_load else blocks_before[on_device.to(device)].cpu()
    assert torch.equal(sums, (source.to(torch.int64) * factors.cpu()).sum(1))
    expected_host, expected_blocks = before.clone(), blocks_before.cpu()
    (expected_blocks if is_load else expected_host)[on_device if is_load else on_host] = source
    assert torch.equal(host, expected_host)
    assert torch.equal(torch.cat(parts, dim=1).cpu(), expected_blocks)
