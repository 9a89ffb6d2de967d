"""Attention of prompt chunks by our kernel, compared with the formula in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_infos import GPU_ENGINE
from full_grid import full
from reference_kernels import attend, loaded, narrowed
from reference_ops import relative_error

from text_generation_proto.cache_groups import CacheGroup
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.batch.step_plan import PlanSizes, StepPlan, pageable_memory, plan_chunks
from text_generation_shard.engines.torch.engine.warm_up import deep_step
from text_generation_shard.engines.torch.kernels.chunk_attention import (
    SPLIT_KEYS,
    ChunkTile,
    PagedChunkAttention,
    tile_for,
)
from text_generation_shard.engines.torch.kernels.flashinfer_chunks import FlashInferChunks
from text_generation_shard.step.table import SequenceTable

TOLERANCES = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
LENGTHS = ((1, 1), (5, 5), (3, 60), (40, 75))
"""Tokens of each chunk, and the length of its sequence after it."""
LONG = ((1, 1), (7, 3 * SPLIT_KEYS + 9), (3, SPLIT_KEYS))
"""Chunks whose keys are divided."""
IMAGES = ((2, 6), (11, 38))
"""First token and end, in the tokens of all chunks, of images whose tokens attend to one another."""


SHAPES = (
    *(((16, 2, 512), None), ((6, 2, 96), 1.5)),
    *((shape, None) for shape in ((4, 4, 80), (3, 1, 192), (140, 1, 40))),
)
"""Heads, heads of keys and their size, and the cap of the scores."""
CASES = [
    # The first shape has a window and FP8 or neither, the second one of them.
    (shape, softcap, window, stored) if row == column % 2 else full(shape, softcap, window, stored)
    for row, (shape, softcap) in enumerate(SHAPES)
    for column, (window, stored) in enumerate(
        ((None, None), (21, None), (21, torch.float8_e4m3fn), (None, torch.float8_e4m3fn))
    )
]


@pytest.mark.parametrize(("shape", "softcap", "window", "stored"), CASES, ids=str)
def test_chunks_match_the_formula(
    shape: tuple[int, int, int],
    softcap: float | None,
    window: int | None,
    stored: torch.dtype | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    scale = shape[2] ** -0.5
    attention = PagedChunkAttention(*shape, device, scale=scale, softcap=softcap, groups={window: 1})
    for images in ((), IMAGES):
        compare(attention, shape, softcap, window, stored, device, dtype, images=images)


@pytest.mark.parametrize(("heads", "latent", "rotated"), [(6, 32, 16), (70, 24, 8), full(128, 512, 64)])
def test_heads_attend_to_latent_rows(
    heads: int, latent: int, rotated: int, device: torch.device, dtype: torch.dtype
) -> None:
    shape = heads, 1, latent + rotated
    attention = PagedChunkAttention(
        *shape, device, scale=shape[2] ** -0.5, softcap=None, groups={None: 1}, latent=latent
    )
    compare(attention, shape, None, None, None, device, dtype, latent)


@pytest.mark.parametrize(
    ("shape", "window", "latent", "stored", "images"),
    [
        ((6, 2, 40), None, 0, None, ()),
        ((3, 1, 40), 2 * SPLIT_KEYS + 20, 0, None, ((2, 6),)),
        ((4, 1, 24), None, 16, None, ()),
        ((2, 1, 32), None, 0, torch.float8_e4m3fn, ()),
    ],
    ids=str,
)
def test_the_keys_of_a_few_tokens_are_divided(
    shape: tuple[int, int, int],
    window: int | None,
    latent: int,
    stored: torch.dtype | None,
    images: tuple[tuple[int, int], ...],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    scale, groups = shape[2] ** -0.5, {window: 1}
    attention = PagedChunkAttention(*shape, device, scale=scale, softcap=None, groups=groups, latent=latent)
    compare(attention, shape, None, window, stored, device, dtype, latent, images, LONG)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashInfer needs a GPU")
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (8, 4, 256)])
def test_flashinfer_matches_the_formula(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    stored: torch.dtype | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    shape = heads, kv_heads, head_dim
    attention = FlashInferChunks(*shape, {window: 1}, (dtype, stored or dtype), scale=head_dim**-0.5)
    compare(attention, shape, None, window, stored, device, dtype)


def compare(
    attention: PagedChunkAttention | FlashInferChunks,
    shape: tuple[int, int, int],
    softcap: float | None,
    window: int | None,
    stored: torch.dtype | None,
    device: torch.device,
    dtype: torch.dtype,
    latent: int = 0,
    images: tuple[tuple[int, int], ...] = (),
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
) -> None:
    """Compare attention with the formula in float64. Its group is the second one; the first has a block for each chunk.

    Positions of the cache that no token attends to are NaN, for our kernel. A cache of another dtype has scales.
    """
    heads, kv_heads, head_dim = shape
    ours = isinstance(attention, PagedChunkAttention)
    scales = None if stored is None else torch.linspace(0.3, 2.0, 2 * kv_heads, device=device).view(2, kv_heads)
    tables = [-(-length // BLOCK_SIZE) for _, length in lengths]
    numbers = torch.randperm(sum(tables) + 3)
    cache = torch.full((len(numbers), 2, kv_heads, BLOCK_SIZE, head_dim), torch.nan if ours else 0.0, dtype=dtype)
    pages = list(numbers.split([*tables, 3]))[:-1]
    for (tokens, length), own in zip(lengths, pages, strict=True):
        for position in range(0 if window is None else max(0, length - tokens - window + 1), length):
            cache[own[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE] = torch.randn(2, kv_heads, head_dim)
    total, count = sum(tokens for tokens, _ in lengths), len(lengths)
    sizes = PlanSizes(total, total, 0, count + sum(tables), count, groups=2)
    plan = StepPlan.blank(sizes, greedy=True, memory=pageable_memory)
    plan.column("pages")[:] = torch.cat([numbers[-1:].expand(count), *pages])
    plan.column("query_indptr")[:] = torch.tensor([0, *(tokens for tokens, _ in lengths)]).cumsum(0)
    for group, ends in enumerate(([0, *[1] * count], [count, *tables])):
        plan.column("page_indptr")[slice(*plan.page_indptr(group))] = torch.tensor(ends).cumsum(0)
    plan.column("last_pages")[:] = [(length - 1) % BLOCK_SIZE + 1 for _, length in lengths]
    names = ("query_indptr", "page_indptr", "last_pages", "pages")
    columns = {name: torch.from_numpy(plan.column(name)).to(device) for name in names}
    wide = 2 * torch.randn(total, (heads + 2) * head_dim, device=device).to(dtype)
    queries, sinks = wide[:, : heads * head_dim].view(total, heads, head_dim), torch.linspace(-2, 3, heads)
    cache, width = cache.to(device, stored), heads * (latent or head_dim)
    if latent:
        cache = cache[:, :1].contiguous()
    out = torch.full((total, width + 8 * ours), torch.nan, device=device, dtype=dtype)
    ahead = torch.zeros(total, dtype=torch.int32)
    for start, end in images:
        ahead[start:end] = torch.arange(end - start - 1, -1, -1)
    is_divided = attention.plan(plan, columns)
    assert not ours or is_divided == (lengths is LONG)
    attention.run(
        queries, cache, window, out[:, :width], sinks.to(device), scales, *((ahead.to(device),) if images else ())
    )
    expected, first = [], 0
    for (tokens, length), own in zip(lengths, pages, strict=True):
        own_queries, own_ahead = queries[first : first + tokens].double(), ahead[first : first + tokens].to(device)
        rules = window, head_dim**-0.5, softcap, sinks.double().to(device), own_ahead
        expected.append(attend(own_queries, loaded(cache, scales), own.to(device), length, *rules))
        first += tokens
    # FlashInfer rounds scaled queries and results once more.
    tolerance = TOLERANCES[dtype] * (1 if ours else 3)
    whole = narrowed(torch.cat(expected), queries, out[:, :width])
    assert relative_error(out[:, :width], whole) < tolerance
    assert out[:, width:].isnan().all()


@pytest.mark.parametrize(
    ("groups", "divides"), [({None: 0}, True), ({128: 1}, False), ({None: 0, 128: 1}, True)], ids=str
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (16, 2, 256), (40, 40, 128)])
def test_the_warm_up_has_a_step_of_divided_keys(
    heads: int, kv_heads: int, head_dim: int, groups: dict[int | None, int], divides: bool
) -> None:
    info = replace(GPU_ENGINE, block_size=BLOCK_SIZE, max_sequence_length=1 << 17)
    kinds = CacheGroup(1), CacheGroup(1, 128)
    table = SequenceTable(info, kinds)
    assert not table.apply(deep_step(info, kinds))
    plan = plan_chunks(table.rows(), [], (None, 128), greedy=True)
    columns = {"page_indptr": torch.from_numpy(plan.column("page_indptr"))}
    attention = PagedChunkAttention(
        heads, kv_heads, head_dim, torch.device("cpu"), scale=1.0, softcap=None, groups=groups
    )
    assert attention.plan(plan, columns) == divides


@pytest.mark.parametrize("head_dim", [40, 96, 192, 512])
def test_a_tile_fits_the_shared_memory_of_its_device(head_dim: int) -> None:
    assert tile_for(head_dim, 227 << 10).stages == 2
    for kib in (99, 163, 227):
        assert tile_for(head_dim, kib << 10).bytes_for(1 << (head_dim - 1).bit_length()) <= kib << 10
    assert tile_for(512, 99 << 10) == ChunkTile(rows=32, keys=16, stages=1)
