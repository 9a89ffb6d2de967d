"""Runs planned steps on the device of one rank; every rank runs the same plans in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from text_generation_proto.progress import WorkProgress
from text_generation_shard.engines.torch.cuda.device_step import DeviceStep, StepContext
from text_generation_shard.engines.torch.cuda.step_plan import ALIGNMENT, COLUMNS, StepPlan
from text_generation_shard.engines.torch.graphs.decode import DecodeGraphs, ForwardOutput, GraphPool
from text_generation_shard.engines.torch.graphs.piecewise import CAPTURE_SIZES, GraphRecorder, PiecewiseGraphs
from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE, CacheShape
from text_generation_shard.engines.torch.model.interface import Model
from text_generation_shard.engines.torch.ops.interface import Kernels
from text_generation_shard.engines.torch.parallel.channel import PeerLossTranslator
from text_generation_shard.engines.torch.parallel.group import ParallelGroup


class Runner:
    """One rank's model, KV cache, block tables and graphs. Steps run in inference mode.

    Block tables and last tokens have one row more than there are slots, the KV cache has one block more than `num_blocks`: they
    belong to the dummy slot, which pads the rows of a graph.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        group: ParallelGroup,
        shape: CacheShape,
        max_slots: int,
        max_sequence_length: int,
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._group = group
        self._translate_peer_loss = PeerLossTranslator(group.channel)
        self._shape = shape
        self._device = shape.device
        self._max_slots = max_slots
        self.max_blocks = -(-max_sequence_length // BLOCK_SIZE)
        """Blocks of the longest sequence."""
        self._tables = torch.zeros(max_slots + 1, self.max_blocks, dtype=torch.int32, device=self._device)
        self._last_tokens = torch.zeros(max_slots + 1, dtype=torch.int32, device=self._device)
        self._context = self._step_context(0)
        self.graphs: DecodeGraphs | None = None
        self._piecewise: PiecewiseGraphs | None = None

    @property
    def cache(self) -> Sequence[Tensor]:
        """The KV cache, per layer."""
        return self._context.cache

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> None:
        """Replace the KV cache by one of `num_blocks` blocks; drops the graphs."""
        self.drop_graphs()
        # The old pool is freed first: both need not fit at once.
        self._context = self._step_context(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._context = self._step_context(num_blocks + 1)
        self._tables[self._max_slots] = num_blocks

    @torch.inference_mode()
    def capture(self, *, only_largest: bool = False, max_tokens: int | None = None) -> int:
        """Capture the graphs, on CUDA; returns the memory weight of a full set, in whole-step graphs.

        With `max_tokens`, only those of at most so many tokens.
        """
        if self._device.type != "cuda":
            return 0
        self.drop_graphs()
        pool = GraphPool()
        dummy_update = (self._max_slots * self.max_blocks, len(self.cache[0]) - 1)
        # The decode graphs share one logits buffer: one per graph would take gigabytes.
        run = partial(self._run, logits=self._model.logits_memory(self._max_slots))
        self.graphs = DecodeGraphs(self._max_slots, self._max_slots, dummy_update, run)
        progress = WorkProgress("capturing graphs", len(self.graphs) + len(CAPTURE_SIZES))
        self.graphs.capture(pool, only_largest=only_largest, max_tokens=max_tokens, captured=progress.add)
        pieces = self.capture_pieces(pool, only_largest=only_largest, max_tokens=max_tokens, captured=progress.add)
        progress.end()
        return len(self.graphs) + (0 if pieces is None else len(pieces))

    def capture_pieces(
        self,
        recorder: GraphRecorder,
        *,
        only_largest: bool = False,
        max_tokens: int | None = None,
        captured: Callable[[], None] = lambda: None,
    ) -> PiecewiseGraphs | None:
        """Capture the pieces of the model; later steps with chunks use them where a capture size fits.

        Returns None for a model that cannot be cut at attention.
        """
        forward = self._model.cut_forward(CAPTURE_SIZES[-1])
        if forward is None:
            return None
        self._piecewise = PiecewiseGraphs(forward, self._context, self._max_slots)
        self._piecewise.record(recorder, only_largest=only_largest, max_tokens=max_tokens, captured=captured)
        return self._piecewise

    def drop_graphs(self) -> None:
        """Free the graphs."""
        self.graphs = self._piecewise = None

    def start(self, plan: StepPlan) -> ForwardOutput:
        """Launch a step. The plan's memory may be reused when the step has finished. Raises GroupBroken, like those below."""
        numbers = torch.from_numpy(plan.numbers)
        with self._translate_peer_loss:
            output = None if self.graphs is None else self.graphs.replay(plan, numbers)
            return output or self._run(plan, numbers.to(self._device, non_blocking=True))

    def broadcast_sampled_tokens(self, slots: Tensor, token_ids: Tensor) -> None:
        """Store the sampled tokens of some slots for the next steps and broadcast them; on rank 0."""
        self._last_tokens.index_copy_(0, slots, token_ids.int())
        self.receive_sampled_tokens()

    def receive_sampled_tokens(self) -> None:
        """Receive the sampled tokens that rank 0 broadcasts."""
        with self._translate_peer_loss:
            self._group.broadcast(self._last_tokens)

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits, float32 [rows, vocabulary], for some hidden states of the last step."""
        with self._translate_peer_loss:
            return self._model.logits(normed)

    def _step_context(self, num_blocks: int) -> StepContext:
        """Allocate a KV cache. It is zeroed, so that it is finite."""
        cache = tuple(
            torch.zeros(
                (num_blocks, 2, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim),
                dtype=self._shape.dtype,
                device=self._device,
            )
            for layer in self._shape.layers
        )
        return StepContext(self._kernels, cache, self._shape.layers, self._tables, self._last_tokens)

    def _run(self, plan: StepPlan, numbers: Tensor, logits: Tensor | None = None) -> ForwardOutput:
        """Compute a step whose plan is in device memory `numbers`; writes the logits to `logits` if given."""
        columns = {name: numbers[start:end] for name, (start, end) in zip(COLUMNS, plan.bounds, strict=True)}
        if plan.sizes.updates:
            self._kernels.update_tables(columns["cells"], columns["blocks"], self._tables)
        if plan.sizes.chunks:
            self._kernels.plan_chunks(plan, columns)
        normed = self._normed(plan, numbers)
        if not plan.num_sampling:
            return ForwardOutput(normed, None, None)
        num_sampling, slots = normed, columns["slots"]
        if plan.sizes.chunks:
            num_sampling, slots = (
                normed.index_select(0, columns["sampling"]),
                slots.index_select(0, columns["sampling"]),
            )
        logits = self._model.logits(num_sampling, logits)
        if not plan.greedy:
            return ForwardOutput(normed, logits, None)
        # Aligned like the columns of a plan.
        width = -(-plan.num_sampling // ALIGNMENT) * ALIGNMENT
        sampled = torch.empty(2 * width, dtype=torch.int32, device=self._device)
        token_ids, bits = sampled.view(2, width)[:, : plan.num_sampling]
        self._kernels.sample_greedy(logits, slots, self._last_tokens, token_ids, bits.view(torch.float32))
        return ForwardOutput(normed, logits, sampled)

    def _normed(self, plan: StepPlan, numbers: Tensor) -> Tensor:
        # The first three columns are those of the tokens; they have equal lengths and distances.
        (start, _), (second, _), *_ = plan.bounds
        columns = numbers[start:].as_strided((3, plan.sizes.tokens), (second - start, 1))
        step = DeviceStep(columns, plan.num_decoding, self._context, plan)
        if self._piecewise is not None and plan.sizes.chunks:
            normed = self._piecewise.run(step)
            if normed is not None:
                return normed
        return self._model.forward(step)
