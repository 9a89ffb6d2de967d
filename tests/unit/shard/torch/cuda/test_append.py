"""The kernel that writes keys and values to the cache."""

from __future__ import annotations

import pytest
import torch
from full_grid import full
from reference_kernels import ReferenceKernels
from torch import Tensor

from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.kernels.append import append


def strided(heads: int, tokens: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random heads [heads, tokens, dim] as a slice of a wider projection."""
    wide = torch.randn(tokens, heads + 2, dim, device=device).to(dtype)
    return wide[:, 1:-1].transpose(0, 1)


@pytest.mark.parametrize(("key_dim", "value_dim", "head_dim"), [(64, 64, 64), (40, 24, 64), full(128, 128, 128)])
def test_keys_and_values_are_written_and_filled_with_zeros(
    key_dim: int, value_dim: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    keys, values = (strided(3, 5, dim, dtype, device) for dim in (key_dim, value_dim))
    tables = torch.tensor([[1, 4], [2, 0]], dtype=torch.int32, device=device)
    positions = torch.tensor([15, 16, 31, 0, 1], dtype=torch.int32, device=device)
    slots = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32, device=device)
    cache, expected = torch.full((2, 5, 2, 3, BLOCK_SIZE, head_dim), 7.0, device=device).to(dtype)
    append(keys, values, cache, positions, slots, tables)
    ReferenceKernels(1.0).append(keys, values, expected, positions, slots, tables)
    assert torch.equal(cache, expected)
    assert (cache == 7.0).sum() == cache.numel() - 5 * 2 * 3 * head_dim


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_is_the_quotient_by_the_scale_of_a_head_and_saturates(stored: torch.dtype, device: torch.device) -> None:
    """The quotients are FP8 numbers already: Triton's interpreter rounds some numbers wrongly."""
    scales = torch.tensor([[0.25, 1.0, 4.0], [0.5, 3.0, 0.125]], device=device)
    quotients = (torch.rand(2, 3, 5, 64, device=device) + 0.5).to(stored).float()
    keys, values = quotients * scales.view(2, 3, 1, 1)
    keys[1, 2, 3], values[0, 0, 0] = 1e6, -1e6
    tables = torch.tensor([[1, 4]], dtype=torch.int32, device=device)
    positions = torch.arange(14, 19, dtype=torch.int32, device=device)
    cache, expected = torch.zeros(2, 5, 2, 3, BLOCK_SIZE, 64, device=device).to(stored)
    for target, write in ((cache, append), (expected, ReferenceKernels(1.0).append)):
        write(keys, values, target, positions, torch.zeros_like(positions), tables, scales)
    assert torch.equal(cache.float(), expected.float())
    assert expected[4, 0, 1, 0, 3] == torch.finfo(stored).max


def test_latent_rows_are_written_alone(dtype: torch.dtype, device: torch.device) -> None:
    rows = torch.randn(1, 3, 40, device=device).to(dtype)
    places = [
        torch.tensor(each, dtype=torch.int32, device=device) for each in ([15, 16, 3], [0, 0, 1], [[1, 4], [2, 0]])
    ]
    cache = torch.full((5, 1, 1, BLOCK_SIZE, 40), 7.0, device=device).to(dtype)
    append(rows, rows, cache, *places)
    assert [
        cache[block, 0, 0, offset].equal(row)
        for (block, offset), row in zip([(1, 15), (4, 0), (2, 3)], rows[0], strict=True)
    ] == [True] * 3
    assert (cache == 7.0).sum() == cache.numel() - rows.numel()
