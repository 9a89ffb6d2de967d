"""The executor of a GPU, or of a tensor-parallel group: launches steps without waiting for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from text_generation_shard.engines.torch.cuda.device_memory import DeviceMemory
from text_generation_shard.engines.torch.cuda.runner import Runner
from text_generation_shard.engines.torch.cuda.step_plan import (
    Ints,
    Padding,
    SlotTables,
    StepPlan,
    plan_chunks,
    plan_decoding,
)
from text_generation_shard.engines.torch.cuda.worker import ROW_RANGE, WorkerCommand, spare_bytes
from text_generation_shard.engines.torch.device import EventRecorder, PinnedBuffers, upload
from text_generation_shard.engines.torch.executor import Launched
from text_generation_shard.engines.torch.kv_cache import CacheShape
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.sampling.sampler import SORTING, ThresholdSearch
from text_generation_shard.step.sequence import StepRow, StepRows


class CudaExecutor:
    """Implements `Executor`. Rank 0 of its group, or the only rank."""

    runs_ahead = True

    def __init__(
        self, runner: Runner, memory: DeviceMemory, group: ParallelGroup, shape: CacheShape, max_slots: int
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._group = group
        self._shape = shape
        self._device = shape.device
        self._tables = SlotTables(max_slots, runner.max_blocks)
        self._pinned = PinnedBuffers(self._device)
        self._events = EventRecorder(self._device)

    @property
    def threshold_search(self) -> ThresholdSearch:
        if self._device.type != "cuda":
            return SORTING
        from text_generation_shard.engines.torch.kernels import threshold

        return ThresholdSearch(threshold.smallest_set_threshold, threshold.kth_largest)

    @property
    def block_bytes(self) -> int:
        return self._shape.block_bytes

    def launch(self, rows: StepRows, *, greedy: bool) -> Launched:
        plan = self._plan(rows, greedy=greedy)
        self._broadcast(WorkerCommand.STEP, plan.numbers.data.cast("B"))
        started = self._events.record()
        output = self._runner.start(plan)
        return Launched(
            hidden=output.normed,
            prefills=_prefills(rows) if rows.prefills else [],
            # A graph computes the logits of its padding rows too.
            logits=None if output.logits is None else output.logits[: rows.num_sampling],
            sampled=output.sampled,
            started=started,
            computed=None if output.sampled is not None else self._events.record(),
        )

    def logits(self, hidden: Tensor, first: int, end: int) -> Tensor:
        self._broadcast(WorkerCommand.LOGITS, ROW_RANGE.pack(first, end))
        return self._runner.logits(hidden[first:end])

    def store_sampled_tokens(self, rows: StepRows, token_ids: Tensor) -> None:
        self._broadcast(WorkerCommand.SAMPLED)
        steady = [] if rows.persistent is None else rows.persistent.slots.tolist()
        slots = upload([*steady, *(row.sequence.slot for row in rows.sampling)], torch.int64, self._device)
        self._runner.broadcast_sampled_tokens(slots, token_ids)

    def allocate(self, num_blocks: int) -> None:
        self._broadcast(WorkerCommand.ALLOCATE, num_blocks.to_bytes(8, "little"))
        self._runner.allocate(num_blocks)

    def begin_measuring(self) -> None:
        self._broadcast(WorkerCommand.BEGIN_MEASURING)
        self._memory.begin_measuring()

    def spare_bytes(self) -> int:
        self._broadcast(WorkerCommand.SPARE_BYTES)
        spare = spare_bytes(self._runner, self._memory)
        return spare if self._group.tp.world_size == 1 else min([spare, *self._group.leader.gather()])

    def ready(self, max_tokens: int | None = None) -> None:
        self._broadcast(WorkerCommand.READY)
        self._runner.capture(max_tokens=max_tokens)

    def is_broken_by(self, error: Exception) -> bool:
        """Return True for any error in a group, whose ranks no longer agree, and for an error of the device itself."""
        if self._group.tp.world_size > 1:
            return True
        if self._device.type != "cuda":
            return False
        try:
            # The step is abandoned, and its host memory will be reused.
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return True
        return False

    def on_broken(self, callback: Callable[[str], None]) -> None:
        if self._group.tp.world_size > 1:
            self._group.leader.watch(callback)

    def close(self) -> None:
        self._runner.allocate(0)
        self._group.close()
        del self._runner

    def _plan(self, rows: StepRows, *, greedy: bool) -> StepPlan:
        updates = self._tables.updates(rows)
        if rows.prefills:
            return plan_chunks(rows, updates, greedy=greedy, memory=self._pinned_memory)
        graphs = self._runner.graphs
        padding = None if graphs is None else graphs.padding(len(rows), len(updates))
        if padding is None:
            padding = Padding(len(rows), len(updates), self._tables.dummy_slot, (0, 0))
        return plan_decoding(rows, updates, padding, greedy=greedy, memory=self._pinned_memory)

    def _pinned_memory(self, length: int) -> Ints:
        numbers: Ints = self._pinned.take(length).numpy()
        return numbers

    def _broadcast(self, kind: WorkerCommand, payload: bytes | memoryview = b"") -> None:
        if self._group.tp.world_size > 1:
            self._group.leader.broadcast(kind, payload)


def _prefills(rows: StepRows) -> list[tuple[StepRow, list[tuple[int, int, int]]]]:
    prefills: list[tuple[StepRow, list[tuple[int, int, int]]]] = []
    at = rows.num_persistent
    for row in rows.others:
        if row.prefills:
            prefills.append((row, [(at, row.start, row.length)]))
        at += row.length
    return prefills
