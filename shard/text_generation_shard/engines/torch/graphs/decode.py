"""Decode steps as CUDA graphs, one per capture size: a step is one launch, regardless of its number of kernels.

A graph reads its step from its own input buffer, [tokens, ids, positions, …] in the layout of `step_plan` for its size, and
writes logits and greedy tokens to fixed output buffers. A step uses the smallest graph that fits; its padding rows belong to
the dummy slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from text_generation_shard.engines.torch.cuda.step_plan import Padding, StepPlan

UPDATES_PER_TOKEN = 4
MIN_UPDATES = 32

T = TypeVar("T")
Work = Callable[[], None]
"""Repeats captured work on the device in the same memory."""


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Output of a step on the device."""

    normed: Tensor
    """[tokens, hidden]: input of the LM head."""
    logits: Tensor | None
    """float32 [rows that sample, vocabulary]; None if no row samples."""
    sampled: Tensor | None
    """int32 [2 · n], n ≥ the number of rows that sample, if sampled greedily: n token ids, then the bits of n logprobs."""


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Work
    numbers: Tensor
    """The step it runs: int32, in the layout of its size."""
    output: ForwardOutput


class GraphPool:
    """Captures graphs that share memory: only one runs at a time, and its output is read before the next one runs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._open: tuple[torch.cuda.CUDAGraph, torch.cuda.graph]

    def record(self, function: Callable[[], T]) -> tuple[Work, T]:
        """Capture a function; returns its work and its result."""
        # Run once before the capture: this compiles kernels, creates handles and allocates memory outside the pool.
        function()
        self.begin()
        try:
            result = function()
        finally:
            work = self.end()
        return work, result

    def begin(self) -> None:
        """Capture the work that is launched from now on."""
        graph = torch.cuda.CUDAGraph()
        # NCCL's threads may make calls that a global capture forbids.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        )
        torch.cuda.synchronize()
        capture.__enter__()
        self._open = graph, capture

    def end(self) -> Work:
        """Return the work since `begin`."""
        graph, capture = self._open
        capture.__exit__(None, None, None)
        return graph.replay


def capture_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture: dense where a padding row costs most."""
    sizes = [size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows]
    return [*sizes, max_rows]


class DecodeGraphs:
    """The graphs of all capture sizes. `run` computes a step whose plan is in a device tensor."""

    def __init__(
        self,
        max_rows: int,
        dummy_slot: int,
        dummy_update: tuple[int, int],
        run: Callable[[StepPlan, Tensor], ForwardOutput],
    ) -> None:
        self._sizes = capture_sizes(max_rows)
        self._paddings = [
            Padding(size, max(UPDATES_PER_TOKEN * size, MIN_UPDATES), dummy_slot, dummy_update) for size in self._sizes
        ]
        self._run = run
        self._graphs: dict[int, _Graph] = {}

    def padding(self, rows: int, updates: int) -> Padding | None:
        """Return the padding for a decode step; None if no graph fits."""
        for padding in islice(self._paddings, bisect_left(self._sizes, rows), None):
            if updates <= padding.updates:
                return padding if padding.tokens in self._graphs else None
        return None

    def capture(
        self,
        pool: GraphPool,
        *,
        only_largest: bool = False,
        max_tokens: int | None = None,
        captured: Callable[[], None] = lambda: None,
    ) -> None:
        """Capture all sizes, those up to `max_tokens`, or only the largest to measure its memory.

        The largest comes first: the others reuse its memory. `captured` is called after each.
        """
        paddings: Iterable[Padding] = reversed(self._paddings)
        for padding in [self._paddings[-1]] if only_largest else paddings:
            if max_tokens is not None and padding.tokens > max_tokens:
                continue
            plan = StepPlan.dummy(padding)
            numbers = torch.from_numpy(plan.numbers).cuda()
            replay, output = pool.record(partial(self._run, plan, numbers))
            self._graphs[padding.tokens] = _Graph(replay, numbers, output)
            captured()

    def replay(self, plan: StepPlan, numbers: Tensor) -> ForwardOutput | None:
        """Run a step by its graph; returns None if no graph fits. `numbers` holds the plan in pinned memory."""
        graph = self._graphs.get(plan.sizes.tokens)
        if plan.sizes.chunks or graph is None or graph.numbers.shape != numbers.shape:
            return None
        graph.numbers.copy_(numbers, non_blocking=True)
        graph.replay()
        # A graph always samples greedily; the result is discarded if the step is not greedy.
        return graph.output if plan.greedy else replace(graph.output, sampled=None)

    def __len__(self) -> int:
        return len(self._paddings)
