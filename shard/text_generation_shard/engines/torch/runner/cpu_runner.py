"""Runs steps on a CPU: each within the call that starts it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_shard.engines.torch.attention.cpu_step import CpuStep
from text_generation_shard.engines.torch.attention.paged import AttentionPlan
from text_generation_shard.engines.torch.attention.step import StepImages
from text_generation_shard.engines.torch.batch.kv_cache import CacheShape, PagedKVCache
from text_generation_shard.engines.torch.batch.step_plan import StepPlan
from text_generation_shard.engines.torch.batch.tiles import StepBatch, build_batch
from text_generation_shard.engines.torch.engine.runner import ForwardOutput, Model, Runner
from text_generation_shard.engines.torch.parallel.group import ParallelGroup


class CpuRunner(Runner):
    def __init__(
        self,
        model: Model,
        group: ParallelGroup,
        shape: CacheShape,
        max_slots: int,
        max_sequence_length: int,
        *,
        shifts_positions: bool = False,
    ) -> None:
        super().__init__(model, group, shape, max_slots, max_sequence_length, shifts_positions=shifts_positions)
        widths = [layer.window for layer in shape.layers if layer.window is not None]
        self._window = max(widths) if len(widths) == len(shape.layers) else None
        """The longest sliding window if every layer has one."""
        self._none = (0,) * len(shape.windows)
        self._cache = PagedKVCache(shape, self._none)

    @torch.inference_mode()
    def allocate(self, num_blocks: Sequence[int]) -> None:
        # The old pool is freed first: both need not fit at once.
        self._cache = PagedKVCache(self._shape, self._none)
        self._cache = PagedKVCache(self._shape, num_blocks)
        self._allocate_states(num_blocks)

    @property
    def cache(self) -> Sequence[Tensor]:
        return self._cache.layers

    def _start(self, plan: StepPlan, images: StepImages | None) -> ForwardOutput:
        step, batch = self._step(plan, images)
        hidden = batch.in_plan_order(self._model.forward(step))
        carried = None if step.carried is None else batch.in_plan_order(step.carried)
        adapters = None if step.adapters is None else batch.in_plan_order(step.adapters)
        if not plan.num_sampling:
            return ForwardOutput(hidden, None, None, carried, adapters)
        rows = torch.from_numpy(plan.column("sampling")).long() if plan.sizes.chunks else slice(None)
        logits = self._model.logits(hidden[rows], adapters=None if adapters is None else adapters[rows])
        return ForwardOutput(hidden, logits, None, carried, adapters)

    def _predict(
        self, plan: StepPlan, ids: Tensor | None, hidden: Tensor, rows: Sequence[int], images: StepImages | None
    ) -> tuple[Tensor, Tensor]:
        if ids is not None:
            plan.column("ids")[: len(ids)] = ids.numpy()
        step, batch = self._step(plan, images, clears=ids is not None)
        normed = batch.in_plan_order(self._model.predict(step, hidden[batch.places]))[rows]
        carried = normed if step.carried is None else batch.in_plan_order(step.carried)[rows]
        return carried, self._model.predicted(normed)

    def _step(
        self, plan: StepPlan, images: StepImages | None = None, *, clears: bool = True
    ) -> tuple[CpuStep, StepBatch]:
        """Return a step; it `clears` the blocks that it enters."""
        if plan.sizes.updates:
            cells, blocks = (torch.from_numpy(plan.column(name)) for name in ("cells", "blocks"))
            self._cells[cells.long()] = blocks
        tables, fills = self._tables, not self.predicts
        batch = build_batch(plan, tables, self._last_tokens, self._cache, self._window, fills=fills)
        if clears and batch.entered_blocks.numel():
            self._cache.clear(batch.entered_blocks)
        attention = AttentionPlan(
            batch, self._tables, self._cache, self._shape, None if images is None else images.ahead
        )
        slots = self._slot_adapters, self._slot_states, self._slot_shifts
        return CpuStep(batch, attention, self._cache, *slots, images), batch
