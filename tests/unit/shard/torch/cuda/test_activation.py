"""The gated activation kernel, with every activation that configs can name."""

from __future__ import annotations

import pytest
import torch
from full_grid import full
from reference_ops import activate, rounded_once

from text_generation_shard.engines.torch.cuda.kernels import activation
from text_generation_shard.engines.torch.model import ACTIVATIONS


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # from numpy, in the interpreter: 1 / (1 + ∞) is intended
@pytest.mark.parametrize("exact", [False, True], ids=["rounded product", "float32 product"])
@pytest.mark.parametrize(("tokens", "inner"), [full(1, 1536), full(5, 1536), full(2, 4864), (3, 1531), (4, 48)])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_matches_float64_rounded_once(
    kind: str, tokens: int, inner: int, exact: bool, dtype: torch.dtype, device: torch.device
) -> None:
    # Gates wide enough to saturate on both sides.
    gate_up = (torch.randn(tokens, 2 * inner, device=device) * 8).to(torch.float32 if exact else dtype)
    out = torch.full((tokens, inner), torch.nan, device=device, dtype=dtype)
    activation.activate(gate_up, kind, out)
    assert rounded_once(out, activate(gate_up.double(), kind))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_is_exact_in_float32_and_writes_only_the_given_rows(kind: str, device: torch.device) -> None:
    """Precise enough to distinguish the two kinds of gelu."""
    buffer = torch.randn(6, 200, device=device)
    out = torch.full((6, 90), torch.nan, device=device)
    activation.activate(buffer[1:5, :160], kind, out[1:5, :80])
    assert rounded_once(out[1:5, :80], activate(buffer[1:5, :160].double(), kind))
    out[1:5, :80] = torch.nan
    assert out.isnan().all()
