"""A step on a CPU: its batch, and its attention by an `AttentionPlan`."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.attention.paged import AttentionPlan
from text_generation_shard.engines.torch.attention.step import ScoreRules, Step, StepImages
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape, PagedKVCache
from text_generation_shard.engines.torch.batch.state_rows import StateRows, state_chunks
from text_generation_shard.engines.torch.batch.tiles import StepBatch
from text_generation_shard.engines.torch.layers.norm import HeadNorms
from text_generation_shard.engines.torch.layers.rope import RotaryEmbedding


class PlainStep(Step):
    """The rotation of a step in plain torch. Results are new tensors: `out` is never given."""

    def __init__(self, positions: Tensor, layers: Sequence[LayerShape]) -> None:
        self.positions = self.rotary_positions = positions
        self._layers = layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        shape = self._layers[layer]
        parts = (keys,) if shape.latent else (keys, values)
        widened = [functional.pad(each, (0, shape.head_dim - each.shape[2])) for each in parts]
        self._write(layer, torch.cat(widened).transpose(0, 1))

    def rotate_and_append(
        self,
        layer: int,
        qkv: Tensor,
        rotary: RotaryEmbedding,
        head_norms: HeadNorms | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        shape = self._layers[layer]
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
        self.rotated(rotated, rotary)
        keys_values = heads[:, shape.num_heads :]
        self._write(layer, keys_values if values is None else torch.cat((rotated[:, shape.num_heads :], values), dim=1))
        queries = heads[:, : shape.num_heads]
        if rotary.rope.query_beta:
            queries.mul_(rotary.query_factors(self.positions).view(-1, 1, 1).to(qkv.dtype))
        return queries

    @property
    def state_rows(self) -> StateRows:
        raise NotImplementedError

    def _write(self, layer: int, keys_values: Tensor) -> None:
        """Keep keys and values [tokens, 2 · KV heads, head_dim], keys first."""
        raise NotImplementedError


class CpuStep(PlainStep):
    def __init__(
        self,
        batch: StepBatch,
        plan: AttentionPlan,
        cache: PagedKVCache,
        slot_adapters: Tensor,
        slot_states: Tensor,
        slot_shifts: Tensor | None = None,
        images: StepImages | None = None,
    ) -> None:
        super().__init__(batch.positions, plan.layers)
        if batch.plan.adapted:
            self.adapters = slot_adapters[self._slots(batch)]
        if images is not None:
            self.images = images.in_order(batch.places)
        if self.images is not None and self.images.positions is not None:
            self.rotary_positions = self.images.positions
        elif slot_shifts is not None:
            self.rotary_positions = self.positions + slot_shifts[self._slots(batch)]
        self._batch = batch
        self._plan = plan
        self._cache = cache
        self._slot_states = slot_states

    @staticmethod
    def _slots(batch: StepBatch) -> Tensor:
        return torch.from_numpy(batch.plan.column("slots")).long()[batch.places]

    def token_ids(self) -> Tensor:
        return self._batch.token_ids

    @cached_property
    def state_rows(self) -> StateRows:
        plan = self._batch.plan
        slots, positions, behind = (torch.from_numpy(plan.column(name)) for name in ("slots", "positions", "behind"))
        blocks = self._slot_states[slots[: plan.num_decoding].long()]
        return StateRows(plan.num_decoding, blocks, positions, behind, state_chunks(plan), places=self._batch.places)

    def embed(self, table: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        rows = functional.embedding(self._batch.token_ids, table)
        return rows if scale == 1.0 else rows.mul_(scale)

    def attend(self, layer: int, queries: Tensor, rules: ScoreRules, out: Tensor | None = None) -> Tensor:
        return self._plan.attend(layer, queries, rules)

    def _write(self, layer: int, keys_values: Tensor) -> None:
        self._cache.write(layer, self._batch.write_index, keys_values)
