"""The RMS norm kernel, alone and after an addition."""

from __future__ import annotations

import pytest
import torch
from full_grid import full
from reference_ops import rms_norm, rounded_once

from text_generation_shard.engines.torch.cuda.kernels import norm

SHAPES = [full(1, 576), full(7, 576), full(3, 4096), full(2, 16384), (4, 577), (2, 1)]
"""Tokens and hidden size: real models, the longest, a prime number, the shortest."""
EPS = 1e-2
"""Much larger than in models, so that it matters."""


@pytest.mark.parametrize("update", ["none", "rounded", "float32"])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_matches_float64_rounded_once(
    tokens: int, hidden: int, update: str, dtype: torch.dtype, device: torch.device
) -> None:
    residual = torch.randn(tokens, hidden, device=device)
    added = torch.randn(tokens, hidden, device=device).to(torch.float32 if update == "float32" else dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    out = torch.full((tokens, hidden), torch.nan, device=device, dtype=dtype)
    before = residual.clone()
    if update == "none":
        norm.rms_norm(residual, weight, EPS, out)
        assert torch.equal(residual, before)
        total = before.double()
    else:
        norm.add_rms_norm(added, residual, weight, EPS, out)
        total = before.double() + added.double()
        assert rounded_once(residual, total)
    assert rounded_once(out, rms_norm(total, weight.double(), EPS))


def test_only_the_given_rows_of_larger_buffers_are_written(device: torch.device) -> None:
    buffers = torch.randn(3, 6, 80, device=device)
    before = buffers.clone()
    update, residual, out = buffers[:, 2:4, :72]
    weight = torch.randn(72, device=device)
    norm.add_rms_norm(update, residual, weight, EPS, out)
    total = (before[0] + before[1])[2:4, :72].double()
    assert rounded_once(out, rms_norm(total, weight.double(), EPS))
    assert torch.equal(buffers[0], before[0])
    buffers[1:, 2:4, :72] = before[1:, 2:4, :72]
    assert torch.equal(buffers, before)
