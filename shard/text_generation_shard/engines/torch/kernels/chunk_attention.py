"""Attention of prompt chunks over the paged cache, where FlashInfer does not serve the head size, or would leave most of a GPU idle.

A program handles some tokens of one chunk with query heads that share a KV head: their queries are the rows of one matrix product
(grouped-query attention, Ainslie et al. 2023). It reads the keys that any of its tokens attends to, a few blocks at a time, with
the running maximum and sum of FlashAttention (Dao et al. 2022). The keys of a few tokens that attend to many are divided among
programs, as those of decode attention. The columns of a step's plan tell the device where the chunks are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.batch.step_plan import StepPlan
from text_generation_shard.engines.torch.kernels.decode_attention import NO_WINDOW
from text_generation_shard.engines.torch.kernels.decode_launch import FLOATS_PER_WARP
from text_generation_shard.engines.torch.kernels.partial_results import LOG2_E, merge, sink_weights

MAX_HEAD_DIM = 512
"""Wider heads do not fit the registers and the shared memory of a multiprocessor."""
RESULTS = 32768
"""Results of a program: eight warps hold them in 128 registers per thread."""
SHARED_MEMORY_ON_CPU, MULTIPROCESSORS_ON_CPU = 232448, 132
"""Bytes per program, and programs at a time, where no device says: those of an H200."""
SPLIT_KEYS = 1024
"""Keys of a program, at least, if the keys of a token are divided."""
WORTH_SPLITS = 3
"""From so many parts on our kernel is faster than FlashInfer's, which computes a tile in 0.6 of the time: by whole prompts on an H200."""


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """The work of a program, and of each turn of its loop."""

    rows: int
    """Pairs of a token and a query head."""
    keys: int
    stages: int
    """Depth of the software pipeline."""

    def bytes_for(self, width: int) -> int:
        """Return the shared memory of queries, keys and values in 16 bits."""
        return 2 * width * (self.rows + 2 * self.stages * self.keys)


def tile_for(head_dim: int, shared_memory: int, rest: int = 0) -> ChunkTile:
    """Return the largest tile for which `shared_memory` bytes are enough, or the smallest one; `rest` are further columns of keys."""
    width = triton.next_power_of_2(head_dim)
    # Compiled for sm_90, none of these spills registers; heads of 192 with 64 keys would.
    # Nor do latent rows with half the results: their queries have more columns.
    rows, keys = min(128, RESULTS // (2 * width if rest else width)), 64 if width <= 128 else 32
    tiles = [ChunkTile(rows, keys, 2), ChunkTile(rows, keys, 1), ChunkTile(max(16, rows // 2), 16, 1)]
    return next((tile for tile in tiles if tile.bytes_for(width + rest) <= shared_memory), ChunkTile(16, 16, 1))


class PagedChunkAttention:
    """Attention of the chunks of a step for layers of one shape; `groups` are those of the cache, by their sliding windows.

    With `latent`, all heads attend to the same rows, whose first `latent` columns are the values.
    """

    def __init__(  # noqa: PLR0913 – the rules of a kind of layers
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        *,
        scale: float,
        softcap: float | None,
        groups: Mapping[int | None, int],
        latent: int = 0,
    ) -> None:
        self._groups = groups
        self._value_dim = latent or head_dim
        self._rest = max(16, triton.next_power_of_2(head_dim - latent)) if latent else 0
        self._tile = tile_for(self._value_dim, _shared_memory(device), self._rest)
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._group = num_heads // num_kv_heads
        # The query heads of a KV head are divided if one token has more of them than a program has rows.
        self._heads_each = min(self._group, self._tile.rows)
        self._head_tiles = triton.cdiv(self._group, self._heads_each)
        self._tokens = self._tile.rows // self._heads_each
        self._multiprocessors = _multiprocessors(device)
        self._scale, self._softcap = scale, softcap
        self._columns: Mapping[str, Tensor] = {}
        self._page_indptr: dict[int | None, Tensor] = {}
        """The column of the group of each window."""
        self._grid = 0, 0, 0
        """Tiles of tokens, tiles of heads, chunks."""
        self._splits: dict[int | None, int] = {}
        """Programs that divide the keys of a tile, for each window."""

    def plan(self, plan: StepPlan, columns: Mapping[str, Tensor]) -> bool:
        """Remember the chunks of a step; `columns` are those of the plan on the device.

        Return True if the keys of one of `groups` are divided enough: there are few tokens for a GPU, which attend to many.
        """
        self._columns = columns
        tiles = triton.cdiv(plan.longest_chunk, self._tokens), self._num_kv_heads * self._head_tiles
        self._grid = *tiles, plan.sizes.chunks
        most = self._multiprocessors // math.prod(self._grid)
        for window, group in self._groups.items():
            part = slice(*plan.page_indptr(group))
            longest = int(np.diff(plan.column("page_indptr")[part]).max()) * BLOCK_SIZE
            self._page_indptr[window] = columns["page_indptr"][part]
            self._splits[window] = max(1, min(most, longest // SPLIT_KEYS))
        return max(self._splits.values()) >= WORTH_SPLITS

    def run(
        self,
        queries: Tensor,
        cache_layer: Tensor,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None = None,
        scales: Tensor | None = None,
        ahead: Tensor | None = None,
    ) -> None:
        """out = softmax(scale · q·kᵀ)·v for the tokens of the chunks, [tokens, heads · value_dim], in the dtype of `queries`.

        `queries` [tokens, heads, head_dim], heads contiguous, rows with any stride; `cache_layer` [blocks, 2, KV heads, BLOCK_SIZE,
        head_dim], contiguous, or of latent rows [blocks, 1, 1, BLOCK_SIZE, head_dim]. With a `window`, only keys with position −
        window < key <= position. `sinks` [heads] are scores of
        keys without values. `scales` float32 [2, KV heads] multiply the keys and values of the cache. With `ahead` int32 [tokens],
        keys up to position + ahead.
        """
        columns, tile = self._columns, self._tile
        splits, heads = self._splits[window], queries.shape[1]
        partials = logs = None
        if splits > 1:
            partials = queries.new_empty(len(queries), splits, heads, self._value_dim, dtype=torch.float32)
            logs = partials.new_empty(partials.shape[:3])
        *tiles, chunks = self._grid
        _attend_chunks_kernel[(*tiles, chunks * splits)](
            queries,
            cache_layer,
            columns["query_indptr"],
            self._page_indptr[window],
            columns["last_pages"],
            columns["pages"],
            out,
            partials,
            logs,
            sinks,
            scales,
            ahead,
            self._scale * LOG2_E if self._softcap is None else self._scale / self._softcap,
            0.0 if self._softcap is None else self._softcap * LOG2_E,
            NO_WINDOW if window is None else window,
            splits,
            queries.stride(0),
            out.stride(0),
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=self._softcap is not None,
            KV_HEADS=self._num_kv_heads,
            GROUP=self._group,
            HEADS_EACH=self._heads_each,
            HEAD_TILES=self._head_tiles,
            TOKENS=self._tokens,
            ROWS=tile.rows,
            KEYS=tile.keys,
            HEAD_DIM=self._head_dim,
            VALUE_DIM=self._value_dim,
            WIDTH=triton.next_power_of_2(self._value_dim),
            REST=self._rest,
            BLOCK=BLOCK_SIZE,
            num_warps=8,
            num_stages=tile.stages,
        )
        if splits > 1:
            _merge_chunks_kernel[(heads, len(queries))](
                out,
                partials,
                logs,
                sinks,
                splits,
                out.stride(0),
                HEADS=heads,
                VALUE_DIM=self._value_dim,
                WIDTH=triton.next_power_of_2(self._value_dim),
                MERGED=FLOATS_PER_WARP * 4,
                num_warps=4,
            )


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS_ON_CPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return SHARED_MEMORY_ON_CPU
    properties = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    return int(properties["max_shared_mem"])


@triton.jit(do_not_specialize=["window", "splits"])
def _attend_chunks_kernel(  # noqa: C901, PLR0913, PLR0915 – a kernel's arguments are flat, and its loop cannot be divided
    queries: tl.tensor,
    cache_layer: tl.tensor,
    query_indptr: tl.tensor,
    page_indptr: tl.tensor,
    last_pages: tl.tensor,
    pages: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor | None,
    logs: tl.tensor | None,
    sinks: tl.tensor | None,
    scales: tl.tensor | None,
    ahead: tl.tensor | None,
    scale: float,
    softcap: float,
    window: int,
    splits: int,
    query_stride: int,
    out_stride: int,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # The last tokens of a chunk attend to most keys: they come first.
    tile, heads_of, chunk = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if partials is not None:
        split = chunk % splits
        chunk = chunk // splits
    first_query = tl.load(query_indptr + chunk)
    count = tl.load(query_indptr + chunk + 1) - first_query
    if tile * TOKENS >= count:
        return
    first_page = tl.load(page_indptr + chunk)
    num_pages = tl.load(page_indptr + chunk + 1) - first_page
    length = (num_pages - 1) * BLOCK + tl.load(last_pages + chunk)
    kv_head, head_tile = heads_of // HEAD_TILES, heads_of % HEAD_TILES

    rows = tl.arange(0, ROWS)
    tokens = tile * TOKENS + rows // HEADS_EACH
    heads = head_tile * HEADS_EACH + rows % HEADS_EACH
    is_row = (rows < TOKENS * HEADS_EACH) & (tokens < count) & (heads < GROUP)
    # The other rows repeat a real one.
    heads = kv_head * GROUP + tl.minimum(heads, GROUP - 1)
    tokens = tl.minimum(tokens, tl.minimum((tile + 1) * TOKENS, count) - 1)
    positions = length - count + tokens
    lasts = positions
    if ahead is not None:
        lasts += tl.load(ahead + first_query + tokens)
    if scales is not None:
        scale *= tl.load(scales + kv_head)
    dims = tl.arange(0, WIDTH)
    is_dim = (dims < VALUE_DIM)[None, :]
    # A step may have more than 2³¹ numbers of queries.
    lines = (first_query + tokens).to(tl.int64)
    query_rows = queries + lines[:, None] * query_stride + heads[:, None] * HEAD_DIM
    query = tl.load(query_rows + dims[None, :], mask=is_dim, other=0.0)
    if REST:
        rest = VALUE_DIM + tl.arange(0, REST)
        is_rest = (rest < HEAD_DIM)[None, :]
        query_rest = tl.load(query_rows + rest[None, :], mask=is_rest, other=0.0)
    parts: tl.constexpr = 1 if REST else 2

    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(length - count + tile * TOKENS - window + 1, 0)
    end = tl.minimum(length - count + (tile + 1) * TOKENS, length)
    if ahead is not None:
        end = tl.max(lasts, axis=0) + 1
    keys_of_head = cache_layer + kv_head * (BLOCK * HEAD_DIM)
    # Scores are in units of log 2, because the hardware computes exp2. A row may have no visible key in its first turns: its
    # sums are finite then, and vanish with the first key.
    maximum = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDTH], tl.float32)
    begin, stop = lowest // KEYS * KEYS, end
    if partials is not None:
        share = tl.cdiv(tl.cdiv(end - begin, KEYS), splits) * KEYS
        begin += split * share
        stop = tl.minimum(begin + share, end)
    for start in range(begin, stop, KEYS):
        keys = start + tl.arange(0, KEYS)
        # Keys that no token attends to are not loaded: they may be NaN.
        is_key = (keys >= lowest) & (keys < end)
        numbers = tl.load(pages + first_page + keys // BLOCK, mask=is_key, other=0)
        sources = numbers.to(tl.int64) * (parts * KV_HEADS * BLOCK * HEAD_DIM) + (keys % BLOCK) * HEAD_DIM
        sources = keys_of_head + sources[:, None]
        key = tl.load(sources + dims[None, :], mask=is_key[:, None] & is_dim, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)))
        if REST:
            key_rest = tl.load(sources + rest[None, :], mask=is_key[:, None] & is_rest, other=0.0)
            scores = tl.dot(query_rest, tl.trans(key_rest.to(query.dtype)), scores)
        scores *= scale
        if HAS_SOFTCAP:
            # tanh(x) = 2 · sigmoid(2x) - 1.
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
        visible = keys[None, :] <= lasts[:, None]
        if HAS_WINDOW:
            visible &= keys[None, :] > positions[:, None] - window
        scores = tl.where(visible, scores, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weights, axis=1)
        if REST:
            value = key
        else:
            value = tl.load(
                sources + KV_HEADS * BLOCK * HEAD_DIM + dims[None, :], mask=is_key[:, None] & is_dim, other=0.0
            )
        mean = tl.dot(weights.to(query.dtype), value.to(query.dtype), mean * decay[:, None])
        maximum = new_maximum
    if sinks is not None and partials is None:
        total += sink_weights(sinks, heads, maximum)
    if scales is not None:
        mean *= tl.load(scales + KV_HEADS + kv_head)
    if partials is not None:
        # A part may have no keys, and so no weight. The first one has some.
        has_keys = total > 0.0
        total = tl.where(has_keys, total, 1.0)
        mean = mean / total[:, None]
        places = (lines * splits + split) * (KV_HEADS * GROUP) + heads
        tl.store(partials + places[:, None] * VALUE_DIM + dims[None, :], mean, mask=is_row[:, None] & is_dim)
        tl.store(logs + places, tl.where(has_keys, maximum + tl.log2(total), float("-inf")), mask=is_row)
        return
    mean = mean / total[:, None]
    targets = out + lines[:, None] * out_stride + heads[:, None] * VALUE_DIM + dims[None, :]
    tl.store(targets, mean.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim)


@triton.jit(do_not_specialize=["splits"])
def _merge_chunks_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    out: tl.tensor,
    partials: tl.tensor,
    logs: tl.tensor,
    sinks: tl.tensor | None,
    splits: int,
    out_stride: int,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGED: tl.constexpr,
) -> None:
    head, line = tl.program_id(0), tl.program_id(1)
    merge(partials, logs, sinks, out, line, line * splits, splits, head, out_stride, HEADS, 1, VALUE_DIM, WIDTH, MERGED)
