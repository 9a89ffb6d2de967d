"""The worker of a follower rank: executes the commands that rank 0 broadcasts, in the same order."""

import json
import struct
from enum import IntEnum

import numpy as np
import torch

from text_generation_proto.copies import CopiedBlocks, Copy
from text_generation_shard.engines.torch.attention.step import StepImages
from text_generation_shard.engines.torch.batch.step_plan import Ints, StepPlan
from text_generation_shard.engines.torch.device.copies import PinnedBuffers, pinned_ints
from text_generation_shard.engines.torch.device.host_cache import HostCopies
from text_generation_shard.engines.torch.device.memory import DeviceMemory
from text_generation_shard.engines.torch.engine.runner import Runner
from text_generation_shard.engines.torch.layers.adapted_linear import AdapterStore

GRAPH_BYTES = 4 << 20
"""Driver memory of a graph, besides its tensors."""

ROW_RANGE = struct.Struct("<2q")
"""Rows of hidden states: first, end."""


class WorkerCommand(IntEnum):
    """Kinds of messages on the control channel."""

    STEP = 16
    ALLOCATE = 17
    BEGIN_MEASURING = 18
    SPARE_BYTES = 19
    READY = 20
    LOGITS = 21
    SAMPLED = 22
    ADAPTER = 23
    """The payload is JSON: the arguments of `AdapterStore.change`."""
    IMAGES = 24
    """The images of the next step. The payload is JSON: the data type and the shape of each tensor of `StepImages`, or null."""
    ALLOCATE_HOST = 25
    COPY = 26
    """The payload is JSON: the values of a `Copy`."""
    COPIED = 27
    """The payload begins with the number of a copy. Reply: -1 if it has not ended, else the number of blocks that failed."""
    END_COPIES = 28
    HOST_BYTES = 29
    """Reply: the bytes of the rank's part of the host cache; 0 if there is none."""
    PREDICT = 30
    """The payload is int32: `drafts`, the numbers of `inputs` and `outputs`, these, and the plan of `Runner.predict`."""


class TPWorker:
    def __init__(
        self,
        runner: Runner,
        memory: DeviceMemory,
        device: torch.device,
        adapters: AdapterStore | None,
        host: HostCopies | None,
    ) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._runner = runner
        self._memory = memory
        self._adapters = adapters
        self._host = host
        self._copied: dict[int, int] = {}
        """The number of blocks that failed of the copies that have ended, by number."""
        self._pinned = PinnedBuffers(device)
        self._hidden = torch.empty(0)
        """Hidden states of the last step."""
        self._images: StepImages | None = None
        """The images of the next step."""

    @torch.inference_mode()
    def execute(self, kind: int, payload: memoryview) -> int | None:
        """Execute a command; returns its reply, if it has one. `payload` is not used after that."""
        if self._stream is not None:
            # The current stream is per thread, and a follower runs in its own thread.
            torch.cuda.set_stream(self._stream)
        match kind:
            case WorkerCommand.STEP | WorkerCommand.PREDICT:
                run = self._step if kind == WorkerCommand.STEP else self._predict
                run(np.frombuffer(payload, dtype=np.int32))
            case WorkerCommand.IMAGES:
                device, sizes = self._runner.device, json.loads(bytes(payload))
                self._images = StepImages(
                    *(each and torch.empty(each[1], dtype=getattr(torch, each[0]), device=device) for each in sizes)
                )
                self._runner.broadcast_images(self._images)
            case WorkerCommand.ALLOCATE:
                if self._host is not None:
                    self._host.allocate((), ())
                self._runner.allocate(np.frombuffer(payload, dtype=np.int64).tolist())
            case WorkerCommand.BEGIN_MEASURING:
                self._memory.begin_measuring()
            case WorkerCommand.SPARE_BYTES:
                return spare_bytes(self._runner, self._memory)
            case WorkerCommand.READY:
                self._runner.capture()
            case WorkerCommand.SAMPLED:
                self._runner.receive_sampled_tokens()
            case WorkerCommand.LOGITS:
                first, end = ROW_RANGE.unpack(payload)
                self._runner.logits(self._hidden, first, end)
            case WorkerCommand.ADAPTER if self._adapters is not None:
                return self._adapters.change(*json.loads(bytes(payload)))
            case _:
                return self._execute_copies(kind, payload)
        return None

    def _step(self, received: Ints) -> None:
        numbers = self._pinned.take(received.size).numpy()
        numbers[:] = received
        self._hidden = self._runner.start(StepPlan.read(numbers), self._images).normed
        self._images = None

    def _predict(self, received: Ints) -> None:
        drafts, *counts = received[:3].tolist()
        inputs, outputs, plan = np.split(received[3:], np.cumsum(counts))
        numbers = pinned_ints(plan.size, self._runner.device)
        numbers[:] = plan
        rows = inputs.tolist(), outputs.tolist()
        self._runner.predict(StepPlan.read(numbers), *rows, self._images, drafts=bool(drafts))
        self._images = None

    def _execute_copies(self, kind: int, payload: memoryview) -> int | None:
        if (host := self._host) is None:
            if kind not in (WorkerCommand.HOST_BYTES, WorkerCommand.END_COPIES):
                raise ValueError(f"unknown command {kind}")
            return 0 if kind == WorkerCommand.HOST_BYTES else None
        match kind:
            case WorkerCommand.HOST_BYTES:
                return host.size
            case WorkerCommand.ALLOCATE_HOST:
                host.allocate(np.frombuffer(payload, dtype=np.int64).tolist(), self._runner.block_parts())
            case WorkerCommand.COPY:
                number, is_load, groups = json.loads(bytes(payload))
                host.begin(Copy(number, is_load, tuple(CopiedBlocks(*each) for each in groups)), lambda: None)
            case WorkerCommand.COPIED:
                self._copied |= {end.number: len(end.failed) for end in host.take_ended()}
                return self._copied.pop(ROW_RANGE.unpack(payload)[0], -1)
            case WorkerCommand.END_COPIES:
                host.wait()
                self._copied.clear()
            case _:
                raise ValueError(f"unknown command {kind}")
        return None


def spare_bytes(runner: Runner, memory: DeviceMemory) -> int:
    """Return the memory left after the largest step and all graphs; captures the largest graphs to measure them."""
    spare = memory.spare_bytes()
    before = memory.in_use()
    graphs = runner.capture(only_largest=True)
    taken = memory.in_use() - before
    runner.drop_graphs()
    return spare - taken - graphs * GRAPH_BYTES
