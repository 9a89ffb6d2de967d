"""A step on a CPU: its batch, and its attention by an `AttentionPlan`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.attention.paged import AttentionPlan
from text_generation_shard.engines.torch.cpu.batch import StepBatch, Tile
from text_generation_shard.engines.torch.kv_cache import PagedKVCache
from text_generation_shard.engines.torch.model.interface import SequenceTokens, SingleTokens
from text_generation_shard.engines.torch.model.norm import HeadNorms
from text_generation_shard.engines.torch.model.rope import RotaryEmbedding


class CpuStep:
    """Implements `Step`. Results are new tensors: `out` is never given."""

    def __init__(self, batch: StepBatch, plan: AttentionPlan, cache: PagedKVCache) -> None:
        self._batch = batch
        self._plan = plan
        self._cache = cache
        self._factors: dict[RotaryEmbedding, tuple[Tensor, Tensor]] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._batch.token_ids)

    @property
    def positions(self) -> Tensor:
        return self._batch.positions

    def token_ids(self) -> Tensor:
        return self._batch.token_ids

    def single_tokens(self) -> SingleTokens:
        single = [tiles[0] for tiles in self._batch.offsets if _is_single(tiles)]
        places, slots = [offset for offset, _ in single], [tile.slot for _, tile in single]
        return SingleTokens(torch.tensor(places, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64))

    def sequences(self) -> list[SequenceTokens]:
        return [
            SequenceTokens(tiles[0][1].slot, tiles[0][1].start, [(offset, tile.length) for offset, tile in tiles])
            for tiles in self._batch.offsets
            if not _is_single(tiles)
        ]

    def embed(self, table: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        rows = functional.embedding(self._batch.token_ids, table)
        return rows if scale == 1.0 else rows.mul_(scale)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        head_dim = self._plan.layers[layer].head_dim
        widened = [functional.pad(each, (0, head_dim - each.shape[2])) for each in (keys, values)]
        self._write(layer, torch.cat(widened).transpose(0, 1))

    def rotate_and_append(
        self,
        layer: int,
        qkv: Tensor,
        rotary: RotaryEmbedding,
        head_norms: HeadNorms | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        shape = self._plan.layers[layer]
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
        # Without value heads, values are the keys before their norm and rotation.
        values = None if heads.shape[1] > rotated.shape[1] else heads[:, shape.num_heads :].clone()
        if head_norms is not None:
            if head_norms.values:
                own = heads[:, -shape.num_kv_heads :] if values is None else values
                values = functional.rms_norm(own, (shape.head_dim,), None, head_norms.query.eps)
            normed = functional.rms_norm(
                rotated.to(head_norms.rows.dtype), (shape.head_dim,), None, head_norms.query.eps
            )
            rotated.copy_(normed * head_norms.rows)
        rotary.rotate(rotated, self._factors_of(rotary, qkv.dtype))
        keys_values = heads[:, shape.num_heads :]
        self._write(layer, keys_values if values is None else torch.cat((rotated[:, shape.num_heads :], values), dim=1))
        queries = heads[:, : shape.num_heads]
        if rotary.rope.query_beta:
            queries.mul_(rotary.query_factors(self._batch.positions).view(-1, 1, 1).to(qkv.dtype))
        return queries

    def attend(
        self,
        layer: int,
        queries: Tensor,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._plan.attend(queries, layer, scale, softcap=softcap, sinks=sinks)

    def _write(self, layer: int, keys_values: Tensor) -> None:
        """Write [tokens, 2 · KV heads, head_dim], keys first, to the cache."""
        self._cache.write(layer, self._batch.write_index, keys_values)

    def _factors_of(self, rotary: RotaryEmbedding, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the factors of the rotation, which are the same in all its layers."""
        factors = self._factors.get(rotary)
        if factors is None:
            factors = self._factors[rotary] = rotary.factors(self._batch.positions, dtype)
        return factors


def _is_single(tiles: list[tuple[int, Tile]]) -> bool:
    """Return True if the tiles of a row are one token that continues its sequence."""
    return len(tiles) == 1 and tiles[0][1].length == 1 and tiles[0][1].start > 0
