"""The residual stream's norm, alone and after an addition."""

from __future__ import annotations

import pytest
import torch
from full_grid import full
from reference_ops import rms_norm, rounded_once

from text_generation_shard.engines.torch.cuda.kernels import norm

SHAPES = [full(1, 576), full(7, 576), full(3, 4096), full(2, 16384), (4, 577), (2, 1)]
"""Tokens and hidden size: of real models, the longest, a prime one, the shortest."""
EPS = 1e-2
"""Far larger than models have it, so that it shows."""


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_the_norm_is_that_of_float64_rounded_once(
    tokens: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    residual = torch.randn(tokens, hidden, device=device) * 0.3
    weight = torch.randn(hidden, device=device).to(dtype)
    out = torch.full((tokens, hidden), torch.nan, device=device, dtype=dtype)
    before = residual.clone()
    norm.rms_norm(residual, weight, EPS, out)
    assert rounded_once(out, rms_norm(before.double(), weight.double(), EPS))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("exact", [False, True], ids=["rounded update", "float32 update"])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_an_update_is_added_in_float32_and_then_normed(
    tokens: int, hidden: int, exact: bool, dtype: torch.dtype, device: torch.device
) -> None:
    residual = torch.randn(tokens, hidden, device=device)
    update = torch.randn(tokens, hidden, device=device).to(torch.float32 if exact else dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    out = torch.full((tokens, hidden), torch.nan, device=device, dtype=dtype)
    total = residual.double() + update.double()
    norm.add_rms_norm(update, residual, weight, EPS, out)
    assert rounded_once(residual, total)
    assert rounded_once(out, rms_norm(total, weight.double(), EPS))


def test_only_the_given_rows_of_larger_buffers_are_touched(device: torch.device) -> None:
    buffers = [torch.randn(6, 80, device=device) for _ in range(3)]
    before = [buffer.clone() for buffer in buffers]
    update, residual, out = (buffer[2:4, :72] for buffer in buffers)
    weight = torch.randn(72, device=device)
    norm.add_rms_norm(update, residual, weight, EPS, out)
    total = (before[0] + before[1])[2:4, :72].double()
    assert rounded_once(out, rms_norm(total, weight.double(), EPS))
    for buffer, original, written in zip(buffers, before, (False, True, True), strict=True):
        changed = buffer != original
        assert bool(changed[2:4, :72].any()) is written
        changed[2:4, :72] = False
        assert not changed.any()
