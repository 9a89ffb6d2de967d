"""The RMS norm kernel, alone and after an addition."""

from __future__ import annotations

import pytest
import torch
from full_grid import full
from reference_ops import rms_norm, rounded_once

from text_generation_shard.engines.torch.kernels import norm

SHAPES = [full(1, 576), full(7, 576), full(3, 4096), full(2, 16384), (4, 577), (2, 1)]
"""Tokens and hidden size: real models, the longest, a prime number, the shortest."""
EPS = 1e-2
"""Much larger than in models, so that it matters."""


@pytest.mark.parametrize("is_normed", [True, False])
def test_an_update_is_normed_and_scaled_before_it_is_added(device: torch.device, is_normed: bool) -> None:
    update, residual = torch.randn(2, 3, 577, device=device).unbind()
    weight, update_weight = torch.randn(2, 577, device=device).unbind()
    total = (residual.double() + 0.3 * rms_norm(update.double(), update_weight.double(), EPS)) * 1.7
    out = torch.empty_like(residual)
    norm.rms_norm(residual, weight if is_normed else None, EPS, out, update, update_weight, 0.3, 1.7)
    assert rounded_once(residual, total)
    assert rounded_once(out, rms_norm(total, weight.double(), EPS) if is_normed else total)


@pytest.mark.parametrize("update", ["none", "rounded", "float32"])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_matches_float64_rounded_once(
    tokens: int, hidden: int, update: str, dtype: torch.dtype, device: torch.device
) -> None:
    """The rows are part of larger buffers, whose other values are not written."""
    buffers = torch.randn(3, tokens + 4, hidden + 8, device=device).split(1)
    dtypes = (torch.float32 if update == "float32" else dtype, torch.float32, dtype)
    wide = [buffer[0].to(kind) for buffer, kind in zip(buffers, dtypes, strict=True)]
    before = [buffer.clone() for buffer in wide]
    added, residual, out = (buffer[2:-2, :hidden] for buffer in wide)
    weight = torch.randn(hidden, device=device).to(dtype)
    total = residual.double()
    if update == "none":
        norm.rms_norm(residual, weight, EPS, out)
        assert torch.equal(wide[1], before[1])
    else:
        total += added.double()
        norm.rms_norm(residual, weight, EPS, out, added)
        assert rounded_once(residual, total)
    assert rounded_once(out, rms_norm(total, weight.double(), EPS))
    assert torch.equal(wide[0], before[0])
    for buffer, old in zip(wide[1:], before[1:], strict=True):
        buffer[2:-2, :hidden] = old[2:-2, :hidden]
        assert torch.equal(buffer, old)
