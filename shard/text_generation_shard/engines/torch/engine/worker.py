"""The worker of a rank: executes the commands of rank 0, which broadcasts them to the others, in the same order.

STEP and PREDICT carry plans. All others are CALLs: JSON with the name of a method of `TPWorker`, after `on_`, and its arguments.
"""

import json
from collections.abc import Sequence

import numpy as np
import torch

from text_generation_proto.copies import CopiedBlocks, Copy
from text_generation_shard.engines.torch.attention.step import StepImages
from text_generation_shard.engines.torch.batch.step_plan import Ints, StepPlan
from text_generation_shard.engines.torch.device.copies import PinnedBuffers, pinned_ints
from text_generation_shard.engines.torch.device.memory import DeviceMemory
from text_generation_shard.engines.torch.engine.host_cache import HostCopies
from text_generation_shard.engines.torch.engine.runner import Runner
from text_generation_shard.engines.torch.layers.adapted_linear import AdapterStore

GRAPH_BYTES = 4 << 20
"""Driver memory of a graph, besides its tensors."""

STEP, PREDICT, CALL = 16, 17, 18
"""Kinds of messages on the control channel; lower numbers are the channel's own. The payload of PREDICT is int32: `drafts`, the numbers of `inputs` and `outputs`, these,
and the plan of `Runner.predict`."""


class TPWorker:
    def __init__(
        self,
        runner: Runner,
        memory: DeviceMemory,
        adapters: AdapterStore | None = None,
        host: HostCopies | None = None,
    ) -> None:
        device = runner.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.runner = runner
        self._memory = memory
        self.adapters = adapters
        self.host = host
        """None if there is no host cache."""
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
        if kind == CALL:
            return self.call(*json.loads(bytes(payload)))
        run = self._step if kind == STEP else self._predict
        run(np.frombuffer(payload, dtype=np.int32))
        self._images = None
        return None

    def call(self, name: str, *arguments: object) -> int | None:
        """Call a method by its name after `on_`; returns its reply, if it has one."""
        reply: int | None = getattr(self, f"on_{name}")(*arguments)
        return reply

    def _step(self, received: Ints) -> None:
        numbers = self._pinned.take(received.size).numpy()
        numbers[:] = received
        self._hidden = self.runner.start(StepPlan.read(numbers), self._images).normed

    def _predict(self, received: Ints) -> None:
        drafts, *counts = received[:3].tolist()
        inputs, outputs, plan = np.split(received[3:], np.cumsum(counts))
        numbers = pinned_ints(plan.size, self.runner.device)
        numbers[:] = plan
        rows = inputs.tolist(), outputs.tolist()
        self.runner.predict(StepPlan.read(numbers), *rows, self._images, drafts=bool(drafts))

    def on_images(self, *sizes: tuple[str, Sequence[int]] | None) -> None:
        """Receive the images of the next step: tensors of `StepImages` with these data types and shapes."""
        device = self.runner.device
        tensors = (each and torch.empty(each[1], dtype=getattr(torch, each[0]), device=device) for each in sizes)
        self._images = StepImages(*tensors)
        self.runner.broadcast_images(self._images)

    def on_sampled(self) -> None:
        self.runner.receive_sampled_tokens()

    def on_logits(self, first: int, end: int) -> None:
        self.runner.logits(self._hidden, first, end)

    def on_allocate(self, num_blocks: Sequence[int]) -> None:
        if self.host is not None:  # its views would keep the old cache
            self.host.allocate((), ())
        self.runner.allocate(num_blocks)

    def on_begin_measuring(self) -> None:
        self._memory.begin_measuring()

    def on_spare_bytes(self) -> int:
        """Return the memory left after the largest step and all graphs; captures the largest graphs to measure them."""
        spare = self._memory.spare_bytes()
        before = self._memory.in_use()
        graphs = self.runner.capture(only_largest=True)
        taken = self._memory.in_use() - before
        self.runner.drop_graphs()
        return spare - taken - graphs * GRAPH_BYTES

    def on_ready(self, max_tokens: int | None) -> None:
        self.runner.capture(max_tokens=max_tokens)

    def on_adapter(self, command: str, name: str, argument: str | int = "") -> int | None:
        assert self.adapters is not None
        return self.adapters.change(command, name, argument)

    def on_host_bytes(self) -> int:
        """Return the bytes of the rank's part of the host cache; 0 if there is none."""
        return 0 if self.host is None else self.host.size

    def on_allocate_host(self, num_blocks: Sequence[int]) -> None:
        assert self.host is not None
        self.host.allocate(num_blocks, self.runner.block_parts())

    def on_copy(self, number: int, is_load: bool, groups: Sequence[Sequence[Sequence[int]]]) -> None:  # noqa: FBT001 – JSON
        assert self.host is not None
        self.host.begin(Copy(number, is_load, tuple(CopiedBlocks(*map(tuple, each)) for each in groups)), lambda: None)

    def on_copied(self, number: int) -> int:
        """Return -1 if a copy has not ended, else the number of blocks that failed."""
        assert self.host is not None
        self._copied |= {end.number: len(end.failed) for end in self.host.take_ended()}
        return self._copied.pop(number, -1)

    def on_end_copies(self) -> None:
        if self.host is not None:
            self.host.wait()
            self._copied.clear()
