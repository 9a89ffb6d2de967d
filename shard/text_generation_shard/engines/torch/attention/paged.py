"""Attention of a step over the paged KV cache: one batched matrix product per tile group.

The query heads that share a KV head are folded into the query dimension (grouped-query attention, Ainslie et al. 2023), so
the keys and values of a KV head are read once. The indices and the mask of a group are the same in all layers of the same
shape, so they are computed once per step. On a CPU, plain matrix products are two to four times as fast as
`scaled_dot_product_attention`, except for very small inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.attention.step import ScoreRules
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE, CacheShape, LayerShape, PagedKVCache
from text_generation_shard.engines.torch.batch.tiles import StepBatch, TileGroup

FEW_KEYS = 384
"""Up to this many keys in a group of decode rows, one fused call is faster than three products."""


@dataclass(frozen=True, slots=True)
class _View:
    """Indices and mask of a group for the layers of one shape."""

    read_index: Tensor
    keys: int
    """Tokens read per sequence."""
    mask: Tensor
    """[sequences · KV heads, queries · heads per KV head, keys]: 0, or −inf where a query must not attend. The second
    dimension is 1 if each sequence has one query, because the mask is then the same for all heads."""


@dataclass(frozen=True, slots=True)
class _PlannedGroup:
    group: TileGroup
    views: dict[LayerShape, _View]
    query_index: Tensor | None
    """[sequences · queries]: the token of the group at each padded position; None without padding."""
    result_index: Tensor | None
    """[tokens]: the padded position of each token of the group; None without padding."""


class AttentionPlan:
    """Precomputed attention indices and masks of one step."""

    def __init__(
        self,
        batch: StepBatch,
        tables: Tensor,
        cache: PagedKVCache,
        shape: CacheShape,
        ahead: Tensor | None = None,
    ) -> None:
        """`tables` [groups, slots, blocks] are the block tables, `ahead` is that of `StepImages`, in the order of the plan."""
        self._cache = cache
        self._ahead = ahead
        self.layers = shape.layers
        self._device, self._dtype = shape.device, shape.dtype
        layers = {layer: tables[group] for layer, group in zip(shape.layers, shape.groups, strict=True)}
        self._groups = [self._plan(group, layers) for group in batch.groups]
        largest = max(
            view.read_index.numel() * layer.head_dim
            for planned in self._groups
            for layer, view in planned.views.items()
        )
        # One buffer for all reads of the step: a fresh allocation would be page-faulted in again in every layer.
        self._buffer = torch.empty(largest * BLOCK_SIZE, device=shape.device, dtype=shape.dtype)

    def attend(self, layer: int, queries: Tensor, rules: ScoreRules) -> Tensor:
        results = [self._attend(planned, layer, queries, rules) for planned in self._groups]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _attend(self, planned: _PlannedGroup, layer: int, queries: Tensor, rules: ScoreRules) -> Tensor:
        shape, scale, softcap, sinks = self.layers[layer], rules.scale, rules.softcap, rules.sinks
        group, view = planned.group, planned.views[shape]
        size, kv_heads, head_dim = len(group.tiles), shape.num_kv_heads, shape.head_dim
        own = queries[group.first : group.first + group.tokens]
        buffer = self._buffer[: view.read_index.numel() * BLOCK_SIZE * head_dim]
        self._cache.read(layer, view.read_index, buffer)
        keys, *others = buffer.view(-1, size, kv_heads, view.keys, head_dim)
        values = others[0] if others else keys[..., : shape.latent]
        is_plain = softcap is None and sinks is None
        if is_plain and group.queries == 1 and size * view.keys <= FEW_KEYS:
            mask = view.mask.view(size, kv_heads, 1, view.keys)[:, :1]
            grouped = own.view(size, kv_heads, -1, head_dim)
            fused = functional.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
            return fused.flatten(1)
        if planned.query_index is not None:
            own = own[planned.query_index]
        # [sequences · KV heads, queries · heads per KV head, head_dim]
        share = shape.num_heads // kv_heads
        folded = own.reshape(size, group.queries, kv_heads, share, head_dim).transpose(1, 2)
        folded = folded.reshape(size * kv_heads, group.queries * share, head_dim)
        keys, values = keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)
        if softcap is None:
            scores = torch.baddbmm(view.mask, folded, keys, alpha=scale)
        else:
            scores = torch.bmm(folded, keys).mul_(scale / softcap).tanh_().mul_(softcap).add_(view.mask)
        if sinks is not None:
            column = sinks.to(scores.dtype).view(1, kv_heads, 1, share).expand(size, -1, group.queries, -1)
            scores = torch.cat((scores, column.reshape(*scores.shape[:2], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : view.keys]
        result = torch.bmm(weights, values)
        result = result.view(size, kv_heads, group.queries, -1).transpose(1, 2)
        result = result.reshape(size * group.queries, -1)
        return result if planned.result_index is None else result[planned.result_index]

    def _plan(self, group: TileGroup, layers: Mapping[LayerShape, Tensor]) -> _PlannedGroup:
        device = self._device
        starts, lengths, slots = torch.tensor(
            [(tile.start, tile.length, tile.slot) for tile in group.tiles], device=device
        ).T.unsqueeze(2)
        # A padded position repeats the last token of its tile: the result is finite and is dropped.
        offsets = torch.minimum(torch.arange(group.queries, device=device), lengths - 1)
        query_index = result_index = None
        if group.is_padded:
            query_index = (lengths.cumsum(0) - lengths + offsets).flatten()
            result_index = (torch.arange(group.queries, device=device) < lengths).flatten().nonzero().squeeze(1)
        positions = lasts = starts + offsets
        if self._ahead is not None:
            places = torch.tensor([tile.place for tile in group.tiles], device=device).unsqueeze(1) + offsets
            lasts = positions + self._ahead[places]
        views = {
            layer: self._view(
                group, positions, lasts if layer.bidirectional_images else positions, slots, tables, layer
            )
            for layer, tables in layers.items()
        }
        return _PlannedGroup(group, views, query_index, result_index)

    def _view(
        self,
        group: TileGroup,
        positions: Tensor,
        lasts: Tensor,
        slots: Tensor,
        tables: Tensor,
        layer: LayerShape,
    ) -> _View:
        """Build a view; `positions`, and the last ones that they attend to, are [sequences, queries]; `slots` [sequences, 1]."""
        device, window = self._device, layer.window
        first_blocks = [layer.first_position(tile.start) // BLOCK_SIZE for tile in group.tiles]
        end_blocks = (lasts.amax(1) // BLOCK_SIZE + 1).tolist()
        count = max(end - first for first, end in zip(first_blocks, end_blocks, strict=True))
        first = torch.tensor(first_blocks, device=device).unsqueeze(1)
        end = torch.tensor(end_blocks, device=device).unsqueeze(1)
        # Beyond its last block, a sequence reads that block again: it is masked, and its values are finite.
        blocks = tables[slots, torch.minimum(first + torch.arange(count, device=device), end - 1)].long()
        keys = count * BLOCK_SIZE
        key_positions = (first * BLOCK_SIZE + torch.arange(keys, device=device)).unsqueeze(1)
        query_positions = positions.unsqueeze(2)
        hidden = key_positions > lasts.unsqueeze(2)
        if window is not None:
            hidden |= key_positions <= query_positions - window
        if layer.chunk is not None:
            hidden |= key_positions < query_positions // layer.chunk * layer.chunk
        mask = torch.zeros(hidden.shape, device=device, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        if group.queries > 1:
            mask = mask.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)
        mask = mask.unsqueeze(1).expand(-1, layer.num_kv_heads, -1, -1).reshape(-1, *mask.shape[1:])
        return _View(self._cache.read_index(blocks, layer.vectors), keys, mask)
