"""Plans steps and runs them on all ranks; on a GPU without waiting for them."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, repeat
from threading import Timer

import numpy as np
import torch
from torch import Tensor

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.copies import Copy, CopyEnd
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.engine import EngineError, EngineInfo
from text_generation_shard.engines.torch.attention.step import StepImages
from text_generation_shard.engines.torch.batch.step_plan import (
    Allocate,
    Ints,
    StepPlan,
    TableUpdate,
    plan_chunks,
    plan_decoding,
    table_updates,
)
from text_generation_shard.engines.torch.device.copies import (
    EventRecorder,
    PinnedBuffers,
    pinned_ints,
    upload,
)
from text_generation_shard.engines.torch.engine.images import ImageSteps, shift_of
from text_generation_shard.engines.torch.engine.in_flight import StepInFlight
from text_generation_shard.engines.torch.engine.warm_up import with_host_blocks
from text_generation_shard.engines.torch.engine.worker import CALL, PREDICT, STEP, TPWorker
from text_generation_shard.engines.torch.parallel.channel import GroupBroken
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.sampling.sampler import SORTING, ThresholdSearch
from text_generation_shard.step.sequence import StepRow, StepRows

CONFIRM_S = 0.001
"""Time between two questions if a copy has ended on the other ranks."""


class Executor:
    """The model and the KV cache of a device, on rank 0. With `runs_ahead`, steps are launched before the tokens of the last one are known."""

    def __init__(self, worker: TPWorker, group: ParallelGroup, places: int = 0, *, runs_ahead: bool) -> None:
        """`worker`: that of this rank; `places`: LoRA adapters on the device at a time."""
        self.runs_ahead = runs_ahead
        self.images: ImageSteps | None = None
        """None if the model takes no images."""
        self._worker = worker
        self._runner, self.host, self._adapters = worker.runner, worker.host, worker.adapters
        self._unconfirmed: list[CopyEnd] = []
        """Copies that have ended here, and not yet on all ranks."""
        self._places: dict[str, int] = {}
        """The place of each LoRA adapter on the device, from 1 on; the one used least recently first."""
        self._free_places = list(range(places, 0, -1))
        self._group = group
        self._device = worker.runner.device
        self.kinds, self.block_bytes = self._runner.kinds, self._runner.block_bytes
        """The groups of the KV cache, and bytes of their blocks."""
        self.has_states = self.kinds[-1].is_state
        self.predicts = self._runner.predicts > 0
        self._pinned = PinnedBuffers(self._device)
        self._events = EventRecorder(self._device)

    @property
    def threshold_search(self) -> ThresholdSearch:
        """The search that the sampler uses on this device."""
        if self._device.type != "cuda":
            return SORTING
        from text_generation_shard.engines.torch.kernels import threshold

        return ThresholdSearch(threshold.smallest_set_threshold, threshold.kth_largest)

    def launch(self, rows: StepRows, *, greedy: bool, adapted: bool = False) -> StepInFlight:
        """Launch the forward pass of rows; `greedy`: all take their most probable token; `adapted`: with the kernels of adapters."""
        plan = self._plan(rows, greedy=greedy)
        if adapted or (self._places and any(sequence.adapter for sequence in rows.sequences)):
            plan.with_adapters()
        prefills = _prefills(rows) if rows.prefills else []
        images = None if self.images is None else self.images.of_step(rows, prefills, self._device)
        self._broadcast_images(images)
        self._broadcast(STEP, plan.numbers.data.cast("B"))
        started = self._events.record()
        output = self._runner.start(plan, images)
        computed = None if output.sampled is not None else self._events.record()
        return StepInFlight(rows, prefills, started, output, computed)

    def predict(self, rows: StepRows, inputs: Sequence[int], ids: Sequence[int] = ()) -> Tensor:
        """Return the most probable next tokens of `Model.predict` at the last token of each row that samples.

        `inputs`: see `Runner.predict`. `ids` are the tokens, in the place of those of the rows; without, they are drafts.
        """
        # Not in the ring: nothing waits between the passes of a draft.
        plan = self._plan(rows, greedy=True, memory=partial(pinned_ints, device=self._device))
        plan.column("ids")[: len(ids)] = ids
        ends = accumulate(row.length for row in rows.others)
        outputs = [end - 1 for row, end in zip(rows.others, ends, strict=True) if row.samples]
        images = None if self.images is None else self.images.of_prediction(rows, self._device)
        self._broadcast_images(images)
        if self._group.tp.world_size > 1:
            header = [not ids, len(inputs), len(outputs), *inputs, *outputs]
            payload = np.concatenate((np.array(header, dtype=np.int32), plan.numbers))
            self._broadcast(PREDICT, payload.data.cast("B"))
        return self._runner.predict(plan, inputs, outputs, images, drafts=not ids)

    def _broadcast_images(self, images: StepImages | None) -> None:
        if images is not None and self._group.tp.world_size > 1:
            sizes = [each if each is None else (str(each.dtype)[6:], each.shape) for each in images.tensors]
            self._call("images", *sizes)
            self._runner.broadcast_images(images)

    def logits(self, hidden: Tensor, first: int, end: int) -> Tensor:
        """Return logits [end - first, vocabulary] for rows first <= row < end of the last hidden states."""
        self._call("logits", first, end)
        return self._runner.logits(hidden, first, end)

    def store_sampled_tokens(self, rows: StepRows, token_ids: Tensor) -> None:
        """Store the sampled tokens of the rows that sample, as inputs of the next steps; any of those of a row with drafts."""
        self._call("sampled")
        persistent = [] if rows.persistent is None else rows.persistent.slots.tolist()
        others = (slot for row in rows.sampling for slot in repeat(row.sequence.slot, 1 + len(row.drafts)))
        slots = upload([*persistent, *others], torch.int64, self._device)
        self._runner.broadcast_sampled_tokens(slots, token_ids)

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Replace the KV cache by one with so many blocks of each group. Raises torch.OutOfMemoryError."""
        self._on_all_ranks("allocate", num_blocks)

    def with_host_blocks(
        self, info: EngineInfo, limits: WarmUpLimits, groups: tuple[CacheGroup, ...]
    ) -> tuple[CacheGroup, ...]:
        """Divide the smallest host cache of all ranks into blocks of each group; return the groups with these. Raises InsufficientMemory."""
        if size := min(self._on_all_ranks("host_bytes")):
            groups = with_host_blocks(groups, info, limits, self.block_bytes, size)
            self._on_all_ranks("allocate_host", [group.host_blocks for group in groups])
        return groups

    def begin_copy(self, copy: Copy, on_end: Callable[[], None]) -> None:
        """Begin a copy on all ranks. `on_end` is called on a thread when `copied` may return it."""
        if self.host is None:  # the model has states of its own
            return
        self._on_copied = on_end
        self._call("copy", copy.number, copy.is_load, copy.groups)
        self.host.begin(copy, on_end)

    def copied(self) -> list[CopyEnd]:
        """Return the copies that have ended since the last call. A block that failed on another rank counts as the first one."""
        if self.host is None:
            return []
        ended = [*self._unconfirmed, *self.host.take_ended()]
        if not ended or self._group.tp.world_size == 1:
            return ended
        self._unconfirmed, confirmed = [], []
        for copy in ended:
            self._call("copied", copy.number)
            states = self._replies()
            if min(states) < 0:
                self._unconfirmed.append(copy)
            else:
                confirmed.append(CopyEnd(copy.number, (0, *copy.failed)) if any(states) else copy)
        if self._unconfirmed:
            Timer(CONFIRM_S, self._on_copied).start()
        return confirmed

    def end_copies(self) -> None:
        """Wait for the copies under way on all ranks that have not left, and forget them."""
        if self.host is not None:
            with suppress(GroupBroken):
                self._call("end_copies")
            self.host.wait()
            self._unconfirmed.clear()

    def begin_measuring(self) -> None:
        self._on_all_ranks("begin_measuring")

    def spare_bytes(self) -> int:
        """Return the usable memory minus the peak since `begin_measuring`, in bytes."""
        return min(self._on_all_ranks("spare_bytes"))

    def ready(self, max_tokens: int | None = None) -> None:
        """Prepare what depends on the final size of the KV cache; if given, only for steps of at most `max_tokens` tokens."""
        self._on_all_ranks("ready", max_tokens)

    def is_broken(self) -> bool:
        """Return True if no step can be computed after an error: after any in a group, whose ranks disagree then, else if the device is broken."""
        return self._group.tp.world_size > 1 or self.is_device_broken()

    def is_device_broken(self) -> bool:
        """Return True if the device cannot compute any more, after an error of it."""
        if self._device.type != "cuda":
            return False
        try:
            # The step is abandoned, and its host memory will be reused.
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return True
        return False

    def on_broken(self, callback: Callable[[str], None]) -> None:
        """Register a callback for fatal failure. May be called from any thread, with the reason."""
        if self._group.tp.world_size > 1:
            self._group.leader.watch(callback)

    def close(self) -> None:
        if self.host is not None:
            self.host.close()
        self._runner.allocate([0 for _ in self.kinds])
        self._group.close()
        del self._runner, self._worker

    def _plan(self, rows: StepRows, *, greedy: bool, memory: Allocate | None = None) -> StepPlan:
        memory = memory or self._pinned_memory
        updates = [] if self._adapters is None else self._adapter_updates(rows)
        if self.has_states and rows.prefills:
            chunks = (row.sequence for row in rows.others if row.prefills)
            updates += [(self._runner.slot_cell("states", each.slot), each.state_write) for each in chunks]
        if rows.prefills and self.images is not None and self.images.encoder.rotates:
            # The last chunk of a prompt sets the shift of the positions after it.
            updates += [
                (self._runner.slot_cell("shifts", row.sequence.slot), shift_of(row.sequence) * row.samples)
                for row in rows.others
                if row.prefills
            ]
        updates += table_updates(rows, self._runner.table_rows, self._runner.max_blocks)
        if rows.prefills:
            plan = plan_chunks(rows, updates, self._runner.windows, greedy=greedy, memory=memory)
        else:
            padding = self._runner.padding(rows.tokens, len(updates))
            plan = plan_decoding(rows, updates, padding, greedy=greedy, memory=memory)
        return plan

    def _adapter_updates(self, rows: StepRows) -> list[TableUpdate]:
        """Return the updates that give the slots of new sequences their adapters."""
        new = [row.sequence for row in rows.others if not row.sequence.synced[0]]
        return [(self._runner.slot_cell("adapters", each.slot), self._places.get(each.adapter, 0)) for each in new]

    def load_adapter(self, name: str, folder: str) -> Iterator[None]:
        """Load a LoRA adapter on all ranks; yields while one of them reads it. Raises EngineError."""
        assert self._adapters is not None, "the shard has room for adapters"
        self._on_all_ranks("adapter", "read", name, folder)
        try:
            while min(states := self._on_all_ranks("adapter", "loaded", name)) < 0:
                yield
            if (problem := self._adapters.problem(name)) is not None:
                raise problem
            if not all(states):
                raise EngineError(f"rank {states.index(0)} cannot load the LoRA adapter {name}: its log says why")
        except BaseException:
            self.drop_adapter(name)
            raise

    def use_adapters(self, names: Collection[str]) -> None:
        """Give these LoRA adapters, all that sequences have, places on the device."""
        for name in names:
            if (place := self._places.pop(name, None)) is None:
                if not self._free_places:
                    self._free_places.append(self._places.pop(next(each for each in self._places if each not in names)))
                place = self._free_places.pop()
                self._on_all_ranks("adapter", "place", name, place - 1)
            self._places[name] = place

    def drop_adapter(self, name: str) -> None:
        """Free a LoRA adapter that no sequence has."""
        if (place := self._places.pop(name, None)) is not None:
            self._free_places.append(place)
        self._on_all_ranks("adapter", "drop", name)

    def _on_all_ranks(self, name: str, *arguments: object) -> list[int]:
        """Call a method of the `TPWorker` of each rank; return the replies, if there are any."""
        self._call(name, *arguments)
        own = self._worker.call(name, *arguments)
        return [] if own is None else [own, *self._replies()]

    def _pinned_memory(self, length: int) -> Ints:
        numbers: Ints = self._pinned.take(length).numpy()
        return numbers

    def _call(self, name: str, *arguments: object) -> None:
        """Call a method of the `TPWorker` of each other rank."""
        if self._group.tp.world_size > 1:
            self._broadcast(CALL, json.dumps([name, *arguments]).encode())

    def _replies(self) -> list[int]:
        """Return those of the other ranks to the last call."""
        return self._group.leader.gather() if self._group.tp.world_size > 1 else []

    def _broadcast(self, kind: int, payload: bytes | memoryview) -> None:
        if self._group.tp.world_size > 1:
            self._group.leader.broadcast(kind, payload)


def _prefills(rows: StepRows) -> list[tuple[StepRow, int]]:
    offsets = accumulate((row.length for row in rows.others), initial=rows.num_persistent)
    return [(row, offset) for row, offset in zip(rows.others, offsets, strict=False) if row.prefills]
