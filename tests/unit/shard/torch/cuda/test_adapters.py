"""The products of LoRA adapters by kernels equal those in plain torch."""

from __future__ import annotations

import pytest
import torch
from full_grid import full

from text_generation_shard.engines.torch.kernels.adapters import ACTIVATED_TOKENS, FEW_TOKENS, GroupedRows
from text_generation_shard.engines.torch.kernels.operands import AdapterStack
from text_generation_shard.engines.torch.layers.adapted_linear import LoopedRows

ADAPTERS = 3
SAME = 100
"""Tokens that all have one adapter: a program takes more than one block of them."""


@pytest.mark.parametrize(
    ("tokens", "rank", "inputs"), [(1, 16, 80), (33, 128, 1100), (SAME, 16, 80), (FEW_TOKENS + 1, 32, 600)], ids=str
)
def test_shrink_and_expand(device: torch.device, dtype: torch.dtype, tokens: int, rank: int, inputs: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    # A projection has outputs on both sides of another, as the gates of Qwen3-Next.
    parts = [0] * 130 + [1] * 17 + [0] * 9 + [2] * 5
    down = torch.randn(ADAPTERS, 3 * rank, inputs, generator=draw) * inputs**-0.5
    up = torch.randn(ADAPTERS, len(parts), rank, generator=draw) * rank**-0.5
    indices = torch.randint(0, ADAPTERS + 1, (tokens,), generator=draw, dtype=torch.int32)
    indices[0] = 2
    if tokens == SAME:
        indices[:] = 2
    wide = torch.randn(tokens, inputs + 3, generator=draw)
    y = torch.randn(tokens, len(parts), generator=draw)
    stack = AdapterStack(down.to(device, dtype), up.to(device, dtype), parts)
    exact = AdapterStack(stack.down.float(), stack.up.float(), parts)
    x, found, expected = wide.to(device, dtype)[:, :inputs], y.to(device, copy=True), y.to(device, copy=True)
    rows, looped = GroupedRows(indices.to(device), ADAPTERS), LoopedRows(indices.to(device), ADAPTERS)
    looped.end(looped.begin(x.float(), exact), exact, expected)
    rows.end(rows.begin(x, stack), stack, found)
    check(found, expected, y, indices)
    residual = y.to(device, copy=True)
    update = rows.update(x, stack, lambda: torch.zeros_like(residual), residual)
    check(update + residual, expected, y, indices)


@pytest.mark.parametrize("tokens", [9, SAME], ids=str)
def test_embeddings_and_logits(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    draw, vocabulary, hidden, rank = torch.Generator().manual_seed(tokens), 150, 40, 16
    embedding = [torch.randn(ADAPTERS, *shape, generator=draw) for shape in ((rank, vocabulary), (hidden, rank))]
    head = [torch.randn(ADAPTERS, *shape, generator=draw) for shape in ((rank, hidden), (vocabulary, rank))]
    ids = torch.randint(0, vocabulary, (tokens,), generator=draw).to(device)
    x = torch.randn(tokens, hidden, generator=draw).to(device, dtype)
    indices = torch.randint(0, ADAPTERS + 1, (tokens,), generator=draw, dtype=torch.int32)
    indices[:3] = torch.tensor([2, 0, 1])
    rows, looped = (kind(indices.to(device), ADAPTERS) for kind in (GroupedRows, LoopedRows))
    for (down, up), width in ((embedding, hidden), (head, vocabulary)):
        y = torch.randn(tokens, width, generator=draw)
        stack = AdapterStack(down.to(device, dtype), up.to(device, dtype), [0] * width)
        exact = AdapterStack(stack.down.float(), stack.up.float(), [0] * width)
        found, expected = y.to(device, copy=True), y.to(device, copy=True)
        for each, own, total in ((rows, stack, found), (looped, exact, expected)):
            begun = each.look_up(ids, own) if width == hidden else each.begin(x.to(own.down), own, beside=False)
            each.end(begun, own, total)
        check(found, expected, y, indices)


@pytest.mark.parametrize(
    ("fused", "tokens", "rank"),
    [
        *((False, 33, 128), (True, ACTIVATED_TOKENS + 1, 16), (False, FEW_TOKENS + 1, 16)),
        *(full(True, 33, 128), full(False, ACTIVATED_TOKENS + 1, 16), full(True, FEW_TOKENS + 1, 16)),
    ],
    ids=lambda each: {False: "two", True: "fused"}[each] if isinstance(each, bool) else str(each),
)
def test_the_product_of_gate_and_up_with_its_activation(
    device: torch.device, dtype: torch.dtype, tokens: int, rank: int, fused: bool
) -> None:
    draw, inner, inputs = torch.Generator().manual_seed(tokens), 200, 1100
    parts = [0] * (2 * inner) if fused else [0] * inner + [1] * inner
    down = torch.randn(ADAPTERS, (1 + parts[-1]) * rank, inputs, generator=draw) * inputs**-0.5
    up = torch.randn(ADAPTERS, len(parts), rank, generator=draw) * rank**-0.5
    indices = torch.randint(0, ADAPTERS + 1, (tokens,), generator=draw, dtype=torch.int32)
    x, y = (torch.randn(tokens, width, generator=draw).to(device, dtype) for width in (inputs, 2 * inner))
    stack = AdapterStack(down.to(device, dtype), up.to(device, dtype), parts)
    exact = AdapterStack(stack.down.float(), stack.up.float(), parts)
    found, expected = torch.empty(tokens, inner, device=device, dtype=dtype), torch.empty(tokens, inner, device=device)
    GroupedRows(indices.to(device), ADAPTERS).activate(x, stack, y.clone, "silu", found)
    LoopedRows(indices.to(device), ADAPTERS).activate(x.float(), exact, y.float, "silu", expected)
    assert (found - expected).norm() <= (6e-3 if dtype == torch.bfloat16 else 1e-3) * expected.norm()


def check(found: torch.Tensor, expected: torch.Tensor, y: torch.Tensor, indices: torch.Tensor) -> None:
    """Check the sums of `y` and the changes of tokens with these adapters."""
    without = indices == 0
    assert torch.equal(found.cpu()[without], y[without])
    change = expected.cpu() - y
    assert (found - expected).cpu().norm() <= 3e-3 * change.norm()
