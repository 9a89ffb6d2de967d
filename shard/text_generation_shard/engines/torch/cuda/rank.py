"""What every rank of a group does when the leading one says so: the same calls, in the same order."""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np
import torch

from text_generation_shard.engines.torch.cuda.device_memory import DeviceMemory
from text_generation_shard.engines.torch.cuda.runner import Runner
from text_generation_shard.engines.torch.cuda.staging import Staging
from text_generation_shard.engines.torch.cuda.step_plan import StepPlan

GRAPH_BYTES = 4 << 20
"""What the driver keeps for a graph beside its tensors."""


SPAN = struct.Struct("<2q")
"""Rows of hidden states: the first, and the one after the last."""


class Kind(IntEnum):
    """Of a message on the control channel."""

    STEP = 16
    ALLOCATE = 17
    BEGIN_MEASURING = 18
    SPARE_BYTES = 19
    READY = 20
    LOGITS = 21
    CHOSEN = 22


class Rank:
    """The `Mirror` of a follower: does what comes on the channel."""

    def __init__(self, runner: Runner, memory: DeviceMemory, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._runner = runner
        self._memory = memory
        self._staging = Staging(device)
        self._hidden = torch.empty(0)
        """Of the step started last."""

    @torch.inference_mode()
    def mirror(self, kind: int, payload: memoryview) -> int | None:
        """Do it; the answer, if there is one. `payload` is free again afterwards."""
        if self._stream is not None:
            # Whoever follows has a thread of its own, and a current stream is a thread's.
            torch.cuda.set_stream(self._stream)
        match kind:
            case Kind.STEP:
                received = np.frombuffer(payload, dtype=np.int32)
                numbers = self._staging.take(received.size).numpy()
                numbers[:] = received
                plan = StepPlan.read(numbers)
                self._hidden = self._runner.start(plan).normed
            case Kind.ALLOCATE:
                self._runner.allocate(int.from_bytes(payload, "little"))
            case Kind.BEGIN_MEASURING:
                self._memory.begin_measuring()
            case Kind.SPARE_BYTES:
                return spare_bytes(self._runner, self._memory)
            case Kind.READY:
                self._runner.capture()
            case Kind.CHOSEN:
                self._runner.hear_chosen()
            case Kind.LOGITS:
                first, end = SPAN.unpack(payload)
                self._runner.logits(self._hidden[first:end])
            case _:
                raise ValueError(f"message {kind} is of no known kind")
        return None


def spare_bytes(runner: Runner, memory: DeviceMemory) -> int:
    """What is left beside the largest step and the graphs to come; the largest of them is captured to see what it takes."""
    spare = memory.spare_bytes()
    before = memory.in_use()
    graphs = runner.capture(only_largest=True)
    taken = memory.in_use() - before
    runner.drop_graphs()
    return spare - taken - graphs * GRAPH_BYTES
