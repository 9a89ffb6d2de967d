"""Steps on a GPU, or on several that lead and follow: launched, and left to themselves until their tokens are asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from text_generation_shard.engines.torch.cuda.device_memory import DeviceMemory
from text_generation_shard.engines.torch.cuda.marks import Marks
from text_generation_shard.engines.torch.cuda.parallel.group import Group
from text_generation_shard.engines.torch.cuda.rank import SPAN, Kind, spare_bytes
from text_generation_shard.engines.torch.cuda.runner import Runner
from text_generation_shard.engines.torch.cuda.slot_tables import SlotTables
from text_generation_shard.engines.torch.cuda.staging import Staging
from text_generation_shard.engines.torch.cuda.step_plan import Ints, Padding, StepPlan, plan_chunks, plan_decoding
from text_generation_shard.engines.torch.executor import Launched
from text_generation_shard.engines.torch.kv_cache import CacheShape
from text_generation_shard.engines.torch.sampling.thresholds import SORTING, ThresholdSearch
from text_generation_shard.engines.torch.upload import upload
from text_generation_shard.step.sequence import Row
from text_generation_shard.step.steady import StepRows


class CudaExecutor:
    """See `Executor`. The leading rank of its group, or the only one."""

    runs_ahead = True

    def __init__(self, runner: Runner, memory: DeviceMemory, group: Group, shape: CacheShape, max_slots: int) -> None:
        self._runner = runner
        self._memory = memory
        self._group = group
        self._shape = shape
        self._device = shape.device
        self._tables = SlotTables(max_slots, runner.max_blocks)
        self._staging = Staging(self._device)
        self._marks = Marks(self._device)

    @property
    def threshold_search(self) -> ThresholdSearch:
        if self._device.type != "cuda":
            return SORTING
        from text_generation_shard.engines.torch.cuda.kernels import threshold

        return ThresholdSearch(threshold.smallest_set_threshold, threshold.kth_largest)

    @property
    def block_bytes(self) -> int:
        return self._shape.block_bytes

    def launch(self, rows: StepRows, *, greedy: bool) -> Launched:
        plan = self._plan(rows, greedy=greedy)
        self._tell(Kind.STEP, plan.numbers.data.cast("B"))
        started = self._marks.set()
        outcome = self._runner.start(plan)
        return Launched(
            hidden=outcome.normed,
            places=_places(rows) if rows.prefills else [],
            # A graph computes those of its padding too.
            logits=None if outcome.logits is None else outcome.logits[: rows.num_sampling],
            chosen=outcome.chosen,
            started=started,
            computed=None if outcome.chosen is not None else self._marks.set(),
        )

    def logits(self, hidden: Tensor, first: int, end: int) -> Tensor:
        self._tell(Kind.LOGITS, SPAN.pack(first, end))
        return self._runner.logits(hidden[first:end])

    def tell_chosen(self, rows: StepRows, token_ids: Tensor) -> None:
        self._tell(Kind.CHOSEN)
        steady = [] if rows.steady is None else rows.steady.slots.tolist()
        slots = upload([*steady, *(row.sequence.slot for row in rows.sampling)], torch.int64, self._device)
        self._runner.tell_chosen(slots, token_ids)

    def allocate(self, num_blocks: int) -> None:
        self._tell(Kind.ALLOCATE, num_blocks.to_bytes(8, "little"))
        self._runner.allocate(num_blocks)

    def begin_measuring(self) -> None:
        self._tell(Kind.BEGIN_MEASURING)
        self._memory.begin_measuring()

    def spare_bytes(self) -> int:
        self._tell(Kind.SPARE_BYTES)
        spare = spare_bytes(self._runner, self._memory)
        return spare if self._group.place.size == 1 else min([spare, *self._group.leader.gather()])

    def ready(self) -> None:
        self._tell(Kind.READY)
        self._runner.capture()

    def is_broken_by(self, error: Exception) -> bool:
        """Ranks that no longer do the same cannot go on; nor can a device after an error of its own, whatever is asked of it."""
        if self._group.place.size > 1:
            return True
        if self._device.type != "cuda":
            return False
        try:
            # Nobody will wait for this step, and its memory on the host is used again.
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return True
        return False

    def on_broken(self, tell: Callable[[str], None]) -> None:
        if self._group.place.size > 1:
            self._group.leader.watch(tell)

    def close(self) -> None:
        self._runner.allocate(0)
        self._group.close()
        del self._runner

    def _plan(self, rows: StepRows, *, greedy: bool) -> StepPlan:
        updates = self._tables.updates(rows)
        if rows.prefills:
            return plan_chunks(rows, updates, greedy=greedy, memory=self._memory_for_plan)
        graphs = self._runner.graphs
        padding = None if graphs is None else graphs.padding(len(rows), len(updates))
        if padding is None:
            padding = Padding(len(rows), len(updates), self._tables.dummy_slot, (0, 0))
        return plan_decoding(rows, updates, padding, greedy=greedy, memory=self._memory_for_plan)

    def _memory_for_plan(self, length: int) -> Ints:
        numbers: Ints = self._staging.take(length).numpy()
        return numbers

    def _tell(self, kind: Kind, payload: bytes | memoryview = b"") -> None:
        if self._group.place.size > 1:
            self._group.leader.broadcast(kind, payload)


def _places(rows: StepRows) -> list[tuple[Row, list[tuple[int, int, int]]]]:
    places: list[tuple[Row, list[tuple[int, int, int]]]] = []
    at = rows.num_steady
    for row in rows.others:
        if row.prefills:
            places.append((row, [(at, row.start, row.length)]))
        at += row.length
    return places
