"""Attention of a step over the paged KV cache: one batched matrix product per tile group.

The query heads that share a KV head are folded into the query dimension (grouped-query attention, Ainslie et al. 2023), so
the keys and values of a KV head are read once. The indices and the mask of a group are the same in all layers with the same
window, so they are computed once per step. Measured on CPU, plain matrix products are two to four times as fast as
`scaled_dot_product_attention`, except for very small inputs, where the launch overhead dominates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.cpu.batch import StepBatch, TileGroup
from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE, BlockTables, CacheShape, PagedKVCache
from text_generation_shard.engines.torch.model.config import ModelConfig

FEW_KEYS = 512
"""Up to this many keys in a group of decode rows, one fused call is faster than three products."""


@dataclass(frozen=True, slots=True)
class _View:
    """Indices and mask of a group for the layers with one window size."""

    read_index: Tensor
    keys: int
    """Tokens read per sequence."""
    mask: Tensor
    """[sequences · KV heads, queries · heads per KV head, keys]: 0, or −inf where a query must not attend. The second
    dimension is 1 if each sequence has one query, because the mask is then the same for all heads."""


@dataclass(frozen=True, slots=True)
class _PlannedGroup:
    group: TileGroup
    views: dict[int | None, _View]
    query_index: Tensor | None
    """[sequences · queries]: the token of the group at each padded position; None without padding."""
    result_index: Tensor | None
    """[tokens]: the padded position of each token of the group; None without padding."""


class AttentionPlan:
    """Precomputed attention indices and masks of one step."""

    def __init__(
        self,
        batch: StepBatch,
        tables: BlockTables,
        cache: PagedKVCache,
        shape: CacheShape,
        config: ModelConfig,
    ) -> None:
        self._cache = cache
        self._shape = shape
        self._share = config.num_heads // config.num_kv_heads
        self._scale = shape.head_dim**-0.5
        windows = frozenset(config.windows)
        self._groups = [self._plan(group, tables, windows) for group in batch.groups]
        largest = max(view.read_index.numel() for planned in self._groups for view in planned.views.values())
        # One buffer for all reads of the step: a fresh allocation would be page-faulted in again in every layer.
        self._buffer = torch.empty(largest * BLOCK_SIZE * shape.head_dim, device=shape.device, dtype=shape.dtype)

    def attend(self, queries: Tensor, layer: int, window: int | None) -> Tensor:
        """Return softmax(q·kᵀ / √head_dim)·v as [tokens, heads · head_dim]; `queries` is [tokens, heads, head_dim]."""
        results = [self._attend(planned, queries, layer, window) for planned in self._groups]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _attend(self, planned: _PlannedGroup, queries: Tensor, layer: int, window: int | None) -> Tensor:
        group, view = planned.group, planned.views[window]
        size, kv_heads, head_dim = len(group.tiles), self._shape.num_kv_heads, self._shape.head_dim
        own = queries[group.first : group.first + group.tokens]
        buffer = self._buffer[: view.read_index.numel() * BLOCK_SIZE * head_dim]
        self._cache.read(layer, view.read_index, buffer)
        keys, values = buffer.view(2, size, kv_heads, view.keys, head_dim)
        if group.queries == 1 and size * view.keys <= FEW_KEYS:
            mask = view.mask.view(size, kv_heads, 1, view.keys)[:, :1]
            fused = functional.scaled_dot_product_attention(own.unsqueeze(2), keys, values, mask, enable_gqa=True)
            return fused.flatten(1)
        if planned.query_index is not None:
            own = own[planned.query_index]
        # [sequences · KV heads, queries · heads per KV head, head_dim]
        folded = own.reshape(size, group.queries, kv_heads, self._share, head_dim).transpose(1, 2)
        folded = folded.reshape(size * kv_heads, group.queries * self._share, head_dim)
        scores = torch.baddbmm(view.mask, folded, keys.flatten(0, 1).transpose(1, 2), alpha=self._scale)
        result = torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1))
        result = result.view(size, kv_heads, group.queries, self._share * head_dim).transpose(1, 2)
        result = result.reshape(size * group.queries, kv_heads * self._share * head_dim)
        return result if planned.result_index is None else result[planned.result_index]

    def _plan(self, group: TileGroup, tables: BlockTables, windows: frozenset[int | None]) -> _PlannedGroup:
        device = self._shape.device
        starts, lengths, slots = torch.tensor(
            [(tile.start, tile.length, tile.slot) for tile in group.tiles], device=device
        ).T.unsqueeze(2)
        # A padded position repeats the last token of its tile: the result is finite and is dropped.
        offsets = torch.minimum(torch.arange(group.queries, device=device), lengths - 1)
        query_index = result_index = None
        if group.is_padded:
            query_index = (lengths.cumsum(0) - lengths + offsets).flatten()
            result_index = (torch.arange(group.queries, device=device) < lengths).flatten().nonzero().squeeze(1)
        views = {window: self._view(group, starts + offsets, slots, tables, window) for window in windows}
        return _PlannedGroup(group, views, query_index, result_index)

    def _view(
        self, group: TileGroup, positions: Tensor, slots: Tensor, tables: BlockTables, window: int | None
    ) -> _View:
        """Build the view of a group; `positions` [sequences, queries], `slots` [sequences, 1]."""
        device = self._shape.device
        first_blocks = [0 if window is None else max(0, tile.start - window + 1) // BLOCK_SIZE for tile in group.tiles]
        end_blocks = [-(-tile.end // BLOCK_SIZE) for tile in group.tiles]
        count = max(end - first for first, end in zip(first_blocks, end_blocks, strict=True))
        first = torch.tensor(first_blocks, device=device).unsqueeze(1)
        end = torch.tensor(end_blocks, device=device).unsqueeze(1)
        # Beyond its last block, a sequence reads that block again: it is masked, and its values are finite.
        blocks = tables.lookup(slots, torch.minimum(first + torch.arange(count, device=device), end - 1))
        keys = count * BLOCK_SIZE
        key_positions = (first * BLOCK_SIZE + torch.arange(keys, device=device)).unsqueeze(1)
        query_positions = positions.unsqueeze(2)
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        mask = torch.zeros(hidden.shape, device=device, dtype=self._shape.dtype).masked_fill_(hidden, -torch.inf)
        if group.queries > 1:
            mask = mask.repeat_interleave(self._share, dim=1)
        mask = mask.unsqueeze(1).expand(-1, self._shape.num_kv_heads, -1, -1).reshape(-1, *mask.shape[1:])
        return _View(self._cache.read_index(blocks), keys, mask)
