"""A step on a GPU: its tokens on the device, and their attention by kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from text_generation_shard.engines.torch.attention.step import ScoreRules, Step, StepImages
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.batch.state_rows import StateRows, state_chunks
from text_generation_shard.engines.torch.batch.step_plan import STATE_COLUMNS, StepPlan
from text_generation_shard.engines.torch.kernels.operands import DecodeStep, RopeStep
from text_generation_shard.engines.torch.layers.norm import HeadNorms
from text_generation_shard.engines.torch.layers.rope import RotaryEmbedding

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.kernels.device_kernels import DeviceKernels


@dataclass(frozen=True, slots=True)
class StepContext:
    """The memory that all steps of a runner read and write."""

    kernels: "DeviceKernels"
    cache: Sequence[Tensor]
    """For each layer, [blocks, key or value, KV heads, BLOCK_SIZE, head_dim]; [blocks, 1, 1, BLOCK_SIZE, head_dim] of latent rows."""
    layers: Sequence[LayerShape]
    block_tables: Sequence[Tensor]
    """For each layer, that of its group: int32 [slots + 1, blocks], a row for each slot and one for the dummy slot."""
    last_tokens: Tensor
    """int32 [slots + 1]: the token sampled last."""
    slot_adapters: Tensor
    """int32 [slots + 1]: the LoRA adapter; 0 for none."""
    slot_states: Tensor
    """int32 [slots + 1]: the block of the state."""
    slot_shifts: Tensor | None = None
    """int32 [slots + 1]: difference between rotary position and position of new tokens; None if no slot has any."""
    scales: Mapping[int, Tensor] = field(default_factory=dict)
    """As in `Fp8Cache`."""


class DeviceStep(Step):
    """Implements `Step`. `columns` int32 [4, tokens]: ids, positions, slots and tokens behind; see `step_plan`.

    The first `num_decoding` tokens are those of decode rows, the others those of the planned chunks: see `plan`, whose columns on
    the device are `planned`. `adapted`: a token has a LoRA adapter.
    """

    def __init__(
        self,
        columns: Tensor,
        num_decoding: int,
        context: StepContext,
        plan: StepPlan | None = None,
        planned: Mapping[str, Tensor] | None = None,
        *,
        adapted: bool = False,
        images: StepImages | None = None,
    ) -> None:
        self.images = images
        self.columns = columns
        self._planned = planned or {}
        self._context = context
        self._plan = plan
        self._num_decoding = num_decoding
        self._ids, self.positions, self.slots, self._behind = columns.unbind()
        self.rotary_positions = self.positions
        self._rotary_positions = None
        if images is not None and images.positions is not None:
            # Each token has a row of its own in a table for this step.
            self._rotary_positions = torch.arange(len(self.positions), dtype=torch.int32, device=columns.device)
        elif context.slot_shifts is not None:
            self._rotary_positions = self.positions + context.slot_shifts.index_select(0, self.slots)
        if adapted:
            self.adapters = context.slot_adapters.index_select(0, self.slots)
        self._rope_steps: dict[tuple[RotaryEmbedding, LayerShape], RopeStep] = {}
        self._decode_steps: dict[tuple[float, float | None, int | None], DecodeStep] = {}
        self._queries: Tensor | None = None
        self._out: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def token_ids(self) -> Tensor:
        ids = self._ids.long()
        return torch.where(ids >= 0, ids, self._context.last_tokens[self.slots.long()].long())

    @cached_property
    def state_rows(self) -> StateRows:
        chunks = () if self._plan is None else state_chunks(self._plan)
        blocks = self._context.slot_states.index_select(0, self.slots[: self._num_decoding])
        planned = (self._planned.get(name) for name in ("query_indptr", *STATE_COLUMNS))
        return StateRows(self._num_decoding, blocks, self.positions, self._behind, chunks, *planned)

    def embed(self, table: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.num_tokens, table.shape[1], dtype=torch.float32, device=table.device)
        self._context.kernels.embed(self._ids, self.slots, self._context.last_tokens, table, out, scale)
        return out

    def rotate_and_append(
        self,
        layer: int,
        qkv: Tensor,
        rotary: RotaryEmbedding,
        head_norms: HeadNorms | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        shape = self._context.layers[layer]
        if out is None:
            out = qkv.view(len(qkv), -1, shape.head_dim)[:, : shape.num_heads]
        key = rotary, shape
        if (step := self._rope_steps.get(key)) is None:
            step = self._rope_steps[key] = RopeStep(
                self.positions,
                self.slots,
                self._context.block_tables[layer],
                self._rotary_table(rotary),
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                0.0 if head_norms is None else head_norms.query.eps,
                rotary.rope.query_beta,
                max(rotary.rope.original_max_positions, 1),
                head_norms is not None and head_norms.values,
                self._rotary_positions,
            )
        weights = None if head_norms is None else (head_norms.query.weight, head_norms.key.weight)
        context = self._context
        context.kernels.rotate_and_append(qkv, out, step, context.cache[layer], weights, context.scales.get(layer))
        return out

    def _rotary_table(self, rotary: RotaryEmbedding) -> Tensor:
        positions = None if self.images is None else self.images.positions
        return rotary.table if positions is None else rotary.rows(positions)

    def rotary_rows(self, rotary: RotaryEmbedding) -> Tensor:
        """Return a row of factors for each token, [tokens, 2, head_dim / 2], of a model whose images have rotary positions."""
        if self.images is not None and self.images.positions is not None:
            return rotary.rows(self.images.positions)
        assert self._rotary_positions is not None
        return rotary.table.index_select(0, self._rotary_positions)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        context = self._context
        places = self.positions, self.slots, context.block_tables[layer]
        context.kernels.append(keys, values, context.cache[layer], *places, context.scales.get(layer))

    def attend(self, layer: int, queries: Tensor, rules: ScoreRules, out: Tensor | None = None) -> Tensor:
        context, count = self._context, self._num_decoding
        if out is None:
            out = queries.new_empty(len(queries), queries.shape[1] * context.layers[layer].value_dim)
        row_queries, chunk_queries, row_out, chunk_out = self._divided(queries, out)
        cache_layer, window = context.cache[layer], context.layers[layer].window
        others = rules.sinks, context.scales.get(layer)
        if count:
            step = self._decode_step(layer, rules)
            context.kernels.decode_attention(row_queries, cache_layer, step, window, row_out, *others)
        if count < len(queries):
            ahead = None
            if self.images is not None and context.layers[layer].bidirectional_images and self.images.ahead is not None:
                ahead = self.images.ahead[count:]
            context.kernels.chunk_attention(chunk_queries, cache_layer, window, chunk_out, *others, ahead)
        return out

    def _divided(self, queries: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Return queries and outputs of decode rows and of chunks; buffers that all layers use are divided once."""
        if queries is not self._queries or out is not self._out:
            count = self._num_decoding
            self._queries, self._out = queries, out
            self._parts = queries[:count], queries[count:], out[:count], out[count:]
        return self._parts

    def _decode_step(self, layer: int, rules: ScoreRules) -> DecodeStep:
        # Layers with the same window are in one group.
        key = rules.scale, rules.softcap, self._context.layers[layer].window
        if (step := self._decode_steps.get(key)) is None:
            count = self._num_decoding
            tables = self._context.block_tables[layer]
            step = self._decode_steps[key] = DecodeStep(
                self.positions[:count], self.slots[:count], tables, rules.scale, rules.softcap
            )
        return step
