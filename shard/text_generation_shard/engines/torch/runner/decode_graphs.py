"""Decode steps as CUDA graphs, one per capture size: a step is one launch, regardless of its number of kernels.

A graph reads its step from its own input buffer, [tokens, ids, positions, …] in the layout of `step_plan` for its size, and
writes logits and greedy tokens to fixed output buffers. A step uses the smallest graph that fits; its padding rows belong to
the dummy slot.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from text_generation_shard.engines.torch.batch.step_plan import Padding, StepPlan
from text_generation_shard.engines.torch.engine.runner import ForwardOutput

UPDATES_PER_TOKEN = 4
MIN_UPDATES = 32

T = TypeVar("T")
Work = Callable[[], None]
"""Repeats captured work on the device in the same memory."""


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


def wanted_sizes(sizes: Sequence[int], only_largest: bool, max_tokens: int | None) -> Sequence[int]:  # noqa: FBT001 – values
    """Return the sizes to capture, of those given. The largest comes first: the others reuse its memory."""
    return sizes[-1:] if only_largest else [x for x in reversed(sizes) if max_tokens is None or x <= max_tokens]


class DecodeGraphs:
    """The graphs of all capture sizes, for a cache of `groups`. `run` computes a step whose plan is in a device tensor."""

    def __init__(
        self,
        max_rows: int,
        dummy_slot: int,
        dummy_update: tuple[int, int],
        groups: int,
        run: Callable[[StepPlan, Tensor], ForwardOutput],
    ) -> None:
        self.sizes = capture_sizes(max_rows)
        self._paddings = {
            size: Padding(size, groups * max(UPDATES_PER_TOKEN * size, MIN_UPDATES), dummy_slot, dummy_update)
            for size in self.sizes
        }
        self._run = run
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        """By size, and True for steps with LoRA adapters."""

    def padding(self, rows: int, updates: int) -> Padding | None:
        """Return the padding for a decode step; None if no graph fits."""
        for size in islice(self.sizes, bisect_left(self.sizes, rows), None):
            if updates <= self._paddings[size].updates:
                return self._paddings[size] if (size, False) in self._graphs else None
        return None

    def capture(self, size: int, pool: GraphPool, *, adapted: bool = False) -> None:
        """Capture the graph of one of `sizes`."""
        plan = replace(StepPlan.dummy(self._paddings[size]), adapted=adapted)
        numbers = torch.from_numpy(plan.numbers).cuda()
        replay, output = pool.record(partial(self._run, plan, numbers))
        self._graphs[size, adapted] = _Graph(replay, numbers, output)

    def replay(self, plan: StepPlan, numbers: Tensor, ids: Tensor | None = None) -> ForwardOutput | None:
        """Run a step by its graph; None if none fits. `numbers` is the plan in pinned memory, `ids` on the device replace its first ids."""
        graph = self._graphs.get((plan.sizes.tokens, plan.adapted))
        if plan.sizes.chunks or graph is None or graph.numbers.shape != numbers.shape:
            return None
        graph.numbers.copy_(numbers, non_blocking=True)
        if ids is not None:
            graph.numbers[plan.bounds[0][0] :][: len(ids)] = ids
        graph.replay()
        # A graph always samples greedily; the result is discarded if the step is not greedy.
        return graph.output if plan.greedy else replace(graph.output, sampled=None)
