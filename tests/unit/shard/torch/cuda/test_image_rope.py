"""The rotary embedding kernel of image encoders."""

import pytest
import torch
from full_grid import full
from reference_ops import rounded_once

from text_generation_shard.engines.torch.kernels.image_rope import rotate


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(5, 9, 72), full(1, 3, 16), full(70, 16, 80)])
@pytest.mark.parametrize("is_fused", [True, False])
def test_queries_and_keys_are_rotated(
    tokens: int, heads: int, head_dim: int, is_fused: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Parts of a fused projection stay as they are, as do separate tensors. The factors of both halves may differ."""
    shape = (tokens, 3, heads, head_dim) if is_fused else (3, tokens, heads, head_dim)
    qkv = torch.randn(shape, device=device).to(dtype)
    queries, keys, _ = qkv.unbind(1 if is_fused else 0)
    cos, sin = torch.randn(2, tokens, head_dim, device=device)
    before = qkv.clone()

    rotated = rotate(queries, keys, cos, sin)

    assert torch.equal(qkv, before)
    for found, given in zip(rotated, (queries, keys), strict=True):
        first, second = given.double().chunk(2, dim=-1)
        expected = given.double() * cos.double()[:, None] + torch.cat((-second, first), dim=-1) * sin.double()[:, None]
        assert found.is_contiguous()
        assert rounded_once(found, expected)
