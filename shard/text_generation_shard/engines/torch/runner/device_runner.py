"""Runs planned steps on the GPU of one rank."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from text_generation_common.progress import WorkProgress
from text_generation_shard.engines.torch.attention.device_step import DeviceStep, StepContext
from text_generation_shard.engines.torch.attention.step import StepImages
from text_generation_shard.engines.torch.batch.kv_cache import CacheShape
from text_generation_shard.engines.torch.batch.step_plan import ALIGNMENT, COLUMNS, TOKEN_COLUMNS, Padding, StepPlan
from text_generation_shard.engines.torch.device.copies import select_rows
from text_generation_shard.engines.torch.engine.runner import ForwardOutput, Model, Runner
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.runner.decode_graphs import DecodeGraphs, GraphPool, wanted_sizes
from text_generation_shard.engines.torch.runner.piecewise_graphs import CAPTURE_SIZES, PiecewiseGraphs

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.kernels.device_kernels import DeviceKernels


class DeviceRunner(Runner):
    """Implements `Runner` with kernels and graphs. Each group of the KV cache has one block more, for the dummy slot."""

    def __init__(  # noqa: PLR0913 – the parts of a rank
        self,
        model: Model,
        kernels: "DeviceKernels",
        group: ParallelGroup,
        shape: CacheShape,
        max_slots: int,
        max_sequence_length: int,
        *,
        has_adapters: bool = False,
        shifts_positions: bool = False,
        image_levels: int = 0,
    ) -> None:
        """`image_levels`: see `PiecewiseGraphs`."""
        super().__init__(model, group, shape, max_slots, max_sequence_length, shifts_positions=shifts_positions)
        self._kernels = kernels
        self._num_blocks: Sequence[int] = (0,) * len(self.kinds)
        self._kinds = (False, True) if has_adapters else (False,)
        """The kinds of graphs: for steps without LoRA adapters, and for those with them."""
        self._context = self._step_context(self._num_blocks)
        self._graphs: DecodeGraphs | None = None
        self._predictions: DecodeGraphs | None = None
        """The graphs of `predict`."""
        self._hidden = torch.zeros(max_slots, model.predicts, device=self.device)
        """The hidden states that they read."""
        self._piecewise: PiecewiseGraphs | None = None
        self._image_levels = image_levels

    @property
    def cache(self) -> Sequence[Tensor]:
        return self._context.cache

    @torch.inference_mode()
    def allocate(self, num_blocks: Sequence[int]) -> None:
        self.drop_graphs()
        # The old pool is freed first: both need not fit at once.
        self._context = self._step_context([0 for _ in num_blocks])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._context = self._step_context([number + 1 for number in num_blocks])
        self._num_blocks = num_blocks
        for tables, number in zip(self._tables, num_blocks, strict=False):
            tables[self._max_slots] = number
        self._allocate_states(num_blocks)

    @torch.inference_mode()
    def capture(self, *, only_largest: bool = False, max_tokens: int | None = None, part: slice = slice(None)) -> int:
        if self.device.type != "cuda":
            return 0
        self.drop_graphs()
        pool = GraphPool()
        dummy_update = (self._max_slots * self.max_blocks, self._num_blocks[0])
        # The decode graphs share one logits buffer: one per graph would take gigabytes.
        run = partial(self._run, logits=self._model.logits_memory(self._max_slots))
        self._graphs = DecodeGraphs(self._max_slots, self._max_slots, dummy_update, len(self.windows), run)
        sizes = self._graphs.sizes
        kinds, decoding = len(self._kinds), (len(self._kinds) + bool(self.predicts)) * len(sizes)
        progress = WorkProgress("capturing graphs", decoding + kinds * len(CAPTURE_SIZES))
        for size in wanted_sizes(sizes, only_largest, max_tokens)[part]:
            for adapted in self._kinds:
                self._graphs.capture(size, pool, adapted=adapted)
                progress.add()
        pieces = self.capture_pieces(pool, wanted_sizes(CAPTURE_SIZES, only_largest, max_tokens)[part], progress.add)
        if self.predicts:
            # Last, so that nothing of them lies in memory where others leave their output.
            slots, predict = self._max_slots, self._run_prediction
            self._predictions = DecodeGraphs(slots, slots, dummy_update, len(self.windows), predict)
            for size in wanted_sizes(sizes, only_largest, max_tokens)[part]:
                self._predictions.capture(size, pool)
                progress.add()
        progress.end()
        return decoding + kinds * (0 if pieces is None else len(pieces))

    def capture_pieces(
        self, recorder: GraphPool, sizes: Sequence[int], captured: Callable[[], None]
    ) -> PiecewiseGraphs | None:
        """Capture the pieces of the model for `sizes`, calling `captured` for each; None if it cannot be cut at attention."""
        forward = self._model.cut_forward(CAPTURE_SIZES[-1])
        if forward is None:
            return None
        self._piecewise = PiecewiseGraphs(forward, self._context, self._max_slots, self._image_levels)
        for size in sizes:
            for adapted in self._kinds:
                self._piecewise.capture(size, recorder, adapted=adapted)
                captured()
        return self._piecewise

    def padding(self, rows: int, updates: int) -> Padding:
        padding = None if self._graphs is None else self._graphs.padding(rows, updates)
        return padding or super().padding(rows, updates)

    def drop_graphs(self) -> None:
        self._graphs = self._piecewise = self._predictions = None

    def _start(self, plan: StepPlan, images: StepImages | None) -> ForwardOutput:
        numbers = torch.from_numpy(plan.numbers)
        output = None if self._graphs is None else self._graphs.replay(plan, numbers)
        return output or self._run(plan, numbers.to(self.device, non_blocking=True), None, images)

    def _predict(
        self, plan: StepPlan, ids: Tensor | None, hidden: Tensor, rows: Sequence[int], images: StepImages | None
    ) -> tuple[Tensor, Tensor]:
        numbers = torch.from_numpy(plan.numbers)
        if self._predictions is not None and not plan.sizes.chunks and plan.sizes.tokens <= self._max_slots:
            self._hidden[: len(hidden)].copy_(hidden)
            if (output := self._predictions.replay(plan, numbers, ids)) is not None and output.sampled is not None:
                # Copies: the next pass may be a replay of the same graph.
                return select_rows(output.normed, rows).clone(), select_rows(output.sampled, rows).clone()
        on_device = numbers.to(self.device, non_blocking=True)
        if ids is not None:
            on_device[plan.bounds[0][0] :][: len(ids)] = ids
        step = self._step(plan, on_device, images)
        normed = self._model.predict(step, hidden)
        carried = normed if step.carried is None else step.carried
        return select_rows(carried, rows), self._model.predicted(select_rows(normed, rows))

    def _step_context(self, num_blocks: Sequence[int]) -> StepContext:
        """Allocate a KV cache. It is zeroed, so that it is finite."""
        cache = [layer.zero_() for layer in self._shape.allocate(num_blocks)]
        group_tables = tuple(self._tables)
        tables = [group_tables[group] for group in self._shape.groups]
        numbers = self._last_tokens, self._slot_adapters, self._slot_states, self._slot_shifts
        return StepContext(self._kernels, cache, self._shape.layers, tables, *numbers, self._shape.scales)

    def _run(
        self,
        plan: StepPlan,
        numbers: Tensor,
        logits: Tensor | None = None,
        images: StepImages | None = None,
    ) -> ForwardOutput:
        """Compute a step whose plan is in device memory `numbers`; writes the logits to `logits` if given."""
        step = self._step(plan, numbers, images)
        normed = self._normed(step, has_chunks=bool(plan.sizes.chunks))
        if not plan.num_sampling:
            return ForwardOutput(normed, None, None, step.carried, step.adapters)
        sampled_from, slots, adapters = normed, step.slots, step.adapters
        if plan.sizes.chunks:
            start, end = plan.bounds[COLUMNS.index("sampling")]
            sampling = numbers[start:end]
            sampled_from, slots = normed.index_select(0, sampling), slots.index_select(0, sampling)
            adapters = None if adapters is None else adapters.index_select(0, sampling)
        logits = self._model.logits(sampled_from, logits, adapters)
        if not plan.greedy:
            return ForwardOutput(normed, logits, None, step.carried, step.adapters)
        # Aligned like the columns of a plan.
        width = -(-plan.num_sampling // ALIGNMENT) * ALIGNMENT
        sampled = torch.empty(2 * width, dtype=torch.int32, device=self.device)
        token_ids, bits = sampled.view(2, width)[:, : plan.num_sampling]
        self._kernels.sample_greedy(logits, slots, self._last_tokens, token_ids, bits.view(torch.float32))
        return ForwardOutput(normed, logits, sampled, step.carried, step.adapters)

    def _run_prediction(self, plan: StepPlan, numbers: Tensor) -> ForwardOutput:
        """Compute `Model.predict` from the buffer of hidden states, and the most probable next tokens."""
        step = self._step(plan, numbers)
        normed = self._model.predict(step, self._hidden[: plan.sizes.tokens])
        return ForwardOutput(normed if step.carried is None else step.carried, None, self._model.predicted(normed))

    def _step(self, plan: StepPlan, numbers: Tensor, images: StepImages | None = None) -> DeviceStep:
        """Return the step of a plan in device memory `numbers`, after the updates of the tables."""
        columns = {name: numbers[start:end] for name, (start, end) in zip(COLUMNS, plan.bounds, strict=True)}
        if plan.sizes.updates:
            self._kernels.update_tables(columns["cells"], columns["blocks"], self._cells)
        if plan.sizes.chunks:
            self._kernels.plan_chunks(plan, columns)
        # The columns of the tokens have equal lengths and distances.
        (start, _), (second, _), *_ = plan.bounds
        tokens = numbers[start:].as_strided((TOKEN_COLUMNS, plan.sizes.tokens), (second - start, 1))
        return DeviceStep(tokens, plan.num_decoding, self._context, plan, columns, adapted=plan.adapted, images=images)

    def _normed(self, step: DeviceStep, *, has_chunks: bool) -> Tensor:
        if self._piecewise is not None and has_chunks:
            normed = self._piecewise.run(step)
            if normed is not None:
                return normed
        return self._model.forward(step)
