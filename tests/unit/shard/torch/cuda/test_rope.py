"""The rotary embedding kernel, which also writes keys and values to the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from full_grid import full
from reference_ops import rms_norm, rotate, rounded_once
from torch import Tensor

from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.kernels.operands import RopeStep
from text_generation_shard.engines.torch.kernels.rope import rotate_and_append
from text_generation_shard.engines.torch.layers.rope import Rope, RotaryEmbedding, inverse_frequencies

SLOTS, POSITIONS = 4, 160
DUMMY_BLOCK = SLOTS * POSITIONS // BLOCK_SIZE
SCALE = 1.25
ROPE = Rope("default", 10_000.0)
EPS = 1e-2


@dataclass(frozen=True)
class Heads:
    """Heads of a fused projection."""

    queries: int
    kv: int
    dim: int

    @property
    def width(self) -> int:
        return (self.queries + 2 * self.kv) * self.dim


SMOLLM2, LLAMA_8B, QWEN2 = Heads(9, 3, 64), Heads(32, 8, 128), Heads(14, 2, 64)
CASES = [
    *((SMOLLM2, 4), (Heads(4, 4, 96), 4), (QWEN2, 128)),  # many tokens use larger tiles
    *(full(heads, 4) for heads in (LLAMA_8B, QWEN2, Heads(5, 1, 256), Heads(2, 1, 32))),
    *(full(heads, 1) for heads in (SMOLLM2, LLAMA_8B)),
]


@pytest.mark.parametrize(
    ("exact", "normed"),
    [(False, False), (True, True), full(False, True), full(True, False)],
    ids=["in place, plain", "from float32, normed heads", "in place, normed heads", "from float32, plain"],
)
@pytest.mark.parametrize(("heads", "tokens"), CASES, ids=str)
def test_queries_are_rotated_and_keys_and_values_stored(
    heads: Heads, tokens: int, exact: bool, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """If qkv is `exact`, in float32, queries go to another tensor; otherwise they are rotated in place."""
    step = _step(heads, tokens, device)
    wide = torch.randn(tokens + 2, heads.width + 16, device=device).to(torch.float32 if exact else dtype)
    qkv = wide[1:-1, : heads.width]
    weights = torch.randn(2, heads.dim, device=device).to(dtype)
    split = qkv.double().reshape(tokens, -1, heads.dim)
    queries, keys, values = split.split([heads.queries, heads.kv, heads.kv], dim=1)
    if normed:
        queries, keys = rms_norm(queries, weights[0].double(), EPS), rms_norm(keys, weights[1].double(), EPS)
    cache = _empty_cache(heads, dtype, device)
    before, width = wide.clone(), heads.queries * heads.dim
    target = torch.full((tokens, width + 8), torch.nan, device=device, dtype=dtype)
    rotated = (target if exact else qkv)[:, :width]
    rotate_and_append(qkv, rotated, step, cache, (weights[0], weights[1]) if normed else None)

    queries = rotate(queries, step.positions, _frequencies(heads, device), SCALE)
    keys = rotate(keys, step.positions, _frequencies(heads, device), SCALE)
    assert rounded_once(rotated.reshape(queries.shape), queries)
    # Nothing else is written: neither the rest of the buffers nor other blocks.
    rotated.fill_(torch.nan)
    if not exact:
        before[1:-1, :width] = torch.nan
    torch.testing.assert_close(wide, before, rtol=0, atol=0, equal_nan=True)
    assert target.isnan().all()

    blocks = step.block_tables[step.slots, step.positions // BLOCK_SIZE]
    stored = cache[blocks, :, :, step.positions % BLOCK_SIZE]
    assert rounded_once(stored[:, 0], keys)
    assert torch.equal(stored[:, 1], values.to(dtype))
    cache[blocks, :, :, step.positions % BLOCK_SIZE] = torch.nan
    assert cache.isnan().all()


def test_queries_are_scaled_by_their_position(device: torch.device) -> None:
    heads = Heads(2, 1, 32)
    step = _step(heads, 4, device)
    qkv = torch.randn(4, heads.width, device=device)
    expected, scaled = qkv[:, :64].clone(), qkv[:, :64].clone()
    cache, other = _empty_cache(heads, torch.float32, device), _empty_cache(heads, torch.float32, device)
    rotate_and_append(qkv, expected, step, cache, None)
    rotate_and_append(qkv, scaled, replace(step, query_beta=0.3, query_period=7), other, None)
    factors = 1 + 0.3 * torch.log(1 + torch.floor(step.positions / 7))
    torch.testing.assert_close(scaled, expected * factors.unsqueeze(1))
    torch.testing.assert_close(other, cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("has_values", [False, True], ids=["values are keys", "own values"])
def test_values_are_normed_without_a_weight(has_values: bool, device: torch.device) -> None:
    heads = Heads(4, 2, 48)
    step = replace(_step(heads, 4, device), norms_values=True)
    qkv = torch.randn(4, heads.width - (0 if has_values else 96), device=device)
    values = qkv[:, -96:].double().view(4, 2, 48)
    weights = torch.randn(2, 48, device=device)
    keys = rms_norm(qkv[:, 192:288].double().view(4, 2, 48), weights[1].double(), EPS)
    cache = _empty_cache(heads, torch.float32, device)
    rotate_and_append(qkv, qkv[:, :192], step, cache, (weights[0], weights[1]))
    blocks = step.block_tables[step.slots, step.positions // BLOCK_SIZE]
    stored = cache[blocks, :, :, step.positions % BLOCK_SIZE]
    assert rounded_once(stored[:, 0], rotate(keys, step.positions, _frequencies(heads, device), SCALE))
    assert rounded_once(stored[:, 1], rms_norm(values, torch.ones(48, device=device).double(), EPS))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_is_the_quotient_by_the_scale_of_a_head_and_saturates(stored: torch.dtype, device: torch.device) -> None:
    """The quotients are FP8 numbers already, and nothing is rotated: Triton's interpreter rounds some numbers wrongly."""
    heads, tokens = Heads(4, 3, 64), 4
    step = _step(heads, tokens, device)
    step.table[:, 0], step.table[:, 1] = 1.0, 0.0
    scales = torch.tensor([[0.25, 1.0, 4.0], [0.5, 3.0, 0.125]], device=device)
    quotients = (torch.rand(tokens, 6, 64, device=device) + 0.5).to(stored)
    keys_values = quotients.float() * scales.view(-1, 1)
    keys_values[2, 5, 63], quotients[2, 5, 63] = -1e6, torch.finfo(stored).min
    qkv = torch.cat((torch.randn(tokens, 256, device=device), keys_values.flatten(1)), dim=1)
    cache = torch.zeros_like(_empty_cache(heads, torch.float32, device)).to(stored)
    rotate_and_append(qkv, qkv[:, :256], step, cache, None, scales)
    blocks = step.block_tables[step.slots, step.positions // BLOCK_SIZE]
    written = cache.float()[blocks, :, :, step.positions % BLOCK_SIZE]
    assert torch.equal(written.flatten(1, 2), quotients.float())
    assert cache.float().count_nonzero() == quotients.numel()


def test_tokens_of_the_dummy_slot_are_written_only_to_its_block(device: torch.device) -> None:
    heads = SMOLLM2
    step = _step(heads, 4, device)
    step.slots[1:] = SLOTS
    step.positions[1:] = 0
    qkv = torch.randn(4, heads.width, device=device)
    cache = _empty_cache(heads, torch.float32, device)
    rotate_and_append(qkv, qkv[:, : heads.queries * heads.dim], step, cache, None)
    assert not cache[DUMMY_BLOCK, :, :, 0].isnan().any()
    cache[DUMMY_BLOCK] = torch.nan
    block = step.block_tables[int(step.slots[0]), int(step.positions[0]) // BLOCK_SIZE]
    cache[block, :, :, int(step.positions[0]) % BLOCK_SIZE] = torch.nan
    assert cache.isnan().all()


@pytest.mark.parametrize(
    "rope",
    [
        Rope("llama3", 500_000.0, factor=8.0, original_max_positions=8192),
        Rope("yarn", 10_000.0, factor=4.0, original_max_positions=2048),
    ],
    ids=["llama3", "yarn"],
)
def test_the_table_matches_the_cpu_path(rope: Rope, device: torch.device) -> None:
    positions = torch.arange(10_007, device=device)  # not a multiple of the chunk size
    table = _table(rope, 64, len(positions), device)
    assert (table.dtype, table.shape) == (torch.float32, (10_007, 2, 32))
    cos, sin = RotaryEmbedding(rope, 64, device).factors(positions, torch.float32)
    torch.testing.assert_close(table[:, 0], cos[:, 0, 32:], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, 1], sin[:, 0, 32:], rtol=0, atol=1e-6)


def test_the_rows_of_the_table_are_those_of_the_rotary_positions(device: torch.device) -> None:
    heads = SMOLLM2
    step = _step(heads, 4, device)
    qkv = torch.randn(4, heads.width, device=device)
    results = []
    for rows in (None, step.positions.clone(), step.positions - 1):
        out = torch.empty(4, heads.queries * heads.dim, device=device)
        cache = _empty_cache(heads, torch.float32, device)
        rotate_and_append(qkv, out, replace(step, rotary_positions=rows), cache, None)
        results.append((out, cache))
    plain, same, shifted = results
    assert torch.equal(plain[0], same[0])
    frequencies = _frequencies(heads, device)
    expected = rotate(
        qkv[:, : heads.queries * heads.dim].double().view(4, -1, heads.dim), step.positions - 1, frequencies, SCALE
    )
    assert torch.allclose(shifted[0].view(expected.shape).double(), expected, atol=1e-5)
    # The cells of the cache stay those of the positions.
    assert torch.equal(plain[1].isnan(), shifted[1].isnan())


def _step(heads: Heads, tokens: int, device: torch.device) -> RopeStep:
    """Return a step of tokens at different random positions. The last slot is the dummy slot, with the last block."""
    cells = torch.randperm(SLOTS * POSITIONS, device=device)[:tokens].int()
    blocks = torch.randperm(DUMMY_BLOCK, device=device).int().view(SLOTS, -1)
    return RopeStep(
        positions=cells % POSITIONS,
        slots=cells // POSITIONS,
        block_tables=torch.cat((blocks, torch.full_like(blocks[:1], DUMMY_BLOCK))),
        table=SCALE * _table(ROPE, heads.dim, POSITIONS, device),
        num_heads=heads.queries,
        num_kv_heads=heads.kv,
        head_dim=heads.dim,
        eps=EPS,
    )


def _frequencies(heads: Heads, device: torch.device) -> Tensor:
    return inverse_frequencies(ROPE, heads.dim)[0].to(device)


def _table(rope: Rope, head_dim: int, positions: int, device: torch.device) -> Tensor:
    rotary = RotaryEmbedding(rope, head_dim, device)
    rotary.fill_table(positions)
    return rotary.table


def _empty_cache(heads: Heads, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a cache of NaN, so that writes are visible."""
    return torch.full((DUMMY_BLOCK + 1, 2, heads.kv, BLOCK_SIZE, heads.dim), torch.nan, device=device, dtype=dtype)
