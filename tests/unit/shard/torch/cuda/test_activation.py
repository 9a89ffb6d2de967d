"""The gated activation kernel, with every activation that configs can name."""

from __future__ import annotations

import pytest
import torch
from full_grid import full
from reference_ops import activate, rounded_once

from text_generation_shard.engines.torch.kernels import activation
from text_generation_shard.engines.torch.kernels.operands import ACTIVATIONS, GatedActivation


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # from numpy, in the interpreter: 1 / (1 + ∞) is intended
@pytest.mark.parametrize(
    ("exact", "out_dtype"),
    [(False, None), (True, None), (True, torch.float32)],
    ids=["rounded product", "float32 product", "all float32"],
)
@pytest.mark.parametrize(("tokens", "inner"), [full(1, 1536), full(5, 1536), full(2, 4864), (3, 1531), (4, 48)])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_matches_float64_rounded_once(
    kind: str,
    tokens: int,
    inner: int,
    exact: bool,
    out_dtype: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    # Gates wide enough to saturate on both sides. With float32 results, the two kinds of gelu are distinguished.
    gate_up = (torch.randn(tokens + 2, 2 * inner + 8, device=device) * 8).to(torch.float32 if exact else dtype)
    gate_up = gate_up[1:-1, : 2 * inner]
    buffer = torch.full((tokens + 2, inner + 8), torch.nan, device=device, dtype=out_dtype or dtype)
    out = buffer[1:-1, :inner]
    activation.activate(gate_up, GatedActivation(kind), out)
    assert rounded_once(out, activate(gate_up.double(), kind))
    out.fill_(torch.nan)
    assert buffer.isnan().all()


def test_a_change_is_added_before(dtype: torch.dtype, device: torch.device) -> None:
    gate_up, change = (torch.randn(3, 2 * 1531 + rest, device=device).to(dtype)[:, : 2 * 1531] for rest in (0, 8))
    out = torch.empty(3, 1531, device=device, dtype=dtype)
    activation.activate(gate_up, GatedActivation("silu"), out, change)
    assert rounded_once(out, activate(gate_up.double() + change.double(), "silu"))
