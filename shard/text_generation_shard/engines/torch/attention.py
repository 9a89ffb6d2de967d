"""Attention of a step over the paged cache: each group as one batch of matrix products.

The heads that share a KV head are folded into the queries (grouped-query attention, Ainslie et al. 2023), so a KV head's
keys and values are read once. What a group reads and masks is the same in every layer of one window: it is planned once a
step. Measured on CPU, plain matrix products beat `scaled_dot_product_attention` by two to four times, except where there
is so little to do that starting them is what takes the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.batch import Group, StepBatch
from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE, BlockTables, CacheShape, KVCache
from text_generation_shard.engines.torch.model_config import ModelConfig

FEW_KEYS = 512
"""Up to so many keys in a group of decoding rows, one fused call is faster than three products."""


@dataclass(frozen=True, slots=True)
class _View:
    """What a group reads of the cache in layers of one window."""

    read_index: Tensor
    keys: int
    """Tokens read for each sequence."""
    mask: Tensor
    """[sequences · KV heads, queries · heads that share one, keys], zero, or −inf where a query must not look; the
    second dimension is 1 where one query a sequence makes it the same for all heads."""


@dataclass(frozen=True, slots=True)
class _PlannedGroup:
    group: Group
    views: dict[int | None, _View]
    query_index: Tensor | None
    """[sequences · queries]: the group's token that stands in each padded place; None if nothing is padded."""
    result_index: Tensor | None
    """[tokens]: the padded place of each of the group's tokens; None if nothing is padded."""


class AttentionPlan:
    """How the tokens of one step attend."""

    def __init__(
        self,
        batch: StepBatch,
        tables: BlockTables,
        cache: KVCache,
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
        # One buffer for all reads of the step: memory fresh from the system would be faulted in again in every layer.
        self._buffer = torch.empty(largest * BLOCK_SIZE * shape.head_dim, device=shape.device, dtype=shape.dtype)

    def attend(self, queries: Tensor, layer: int, window: int | None) -> Tensor:
        """softmax(q·kᵀ / √head_dim)·v for `queries` [tokens, heads, head_dim]; [tokens, heads · head_dim]."""
        results = [self._attend(planned, queries, layer, window) for planned in self._groups]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _attend(self, planned: _PlannedGroup, queries: Tensor, layer: int, window: int | None) -> Tensor:
        group, view = planned.group, planned.views[window]
        size, kv_heads, head_dim = len(group.spans), self._shape.num_kv_heads, self._shape.head_dim
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
        # [sequences · KV heads, queries · heads that share one, head_dim]
        folded = own.reshape(size, group.queries, kv_heads, self._share, head_dim).transpose(1, 2)
        folded = folded.reshape(size * kv_heads, group.queries * self._share, head_dim)
        scores = torch.baddbmm(view.mask, folded, keys.flatten(0, 1).transpose(1, 2), alpha=self._scale)
        result = torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1))
        result = result.view(size, kv_heads, group.queries, self._share * head_dim).transpose(1, 2)
        result = result.reshape(size * group.queries, kv_heads * self._share * head_dim)
        return result if planned.result_index is None else result[planned.result_index]

    def _plan(self, group: Group, tables: BlockTables, windows: frozenset[int | None]) -> _PlannedGroup:
        device = self._shape.device
        starts, lengths, slots = torch.tensor(
            [(span.start, span.length, span.slot) for span in group.spans], device=device
        ).T.unsqueeze(2)
        # A padded place repeats the span's last token: its result is finite, and dropped.
        place = torch.minimum(torch.arange(group.queries, device=device), lengths - 1)
        query_index = result_index = None
        if group.is_padded:
            query_index = (lengths.cumsum(0) - lengths + place).flatten()
            result_index = (torch.arange(group.queries, device=device) < lengths).flatten().nonzero().squeeze(1)
        views = {window: self._view(group, starts + place, slots, tables, window) for window in windows}
        return _PlannedGroup(group, views, query_index, result_index)

    def _view(self, group: Group, positions: Tensor, slots: Tensor, tables: BlockTables, window: int | None) -> _View:
        """`positions` [sequences, queries] and `slots` [sequences, 1] of a group."""
        device = self._shape.device
        first_blocks = [0 if window is None else max(0, span.start - window + 1) // BLOCK_SIZE for span in group.spans]
        end_blocks = [-(-span.end // BLOCK_SIZE) for span in group.spans]
        count = max(end - first for first, end in zip(first_blocks, end_blocks, strict=True))
        first = torch.tensor(first_blocks, device=device).unsqueeze(1)
        end = torch.tensor(end_blocks, device=device).unsqueeze(1)
        # Past its last block a sequence reads that block again: masked, and known to be finite.
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
