"""Decoding steps as CUDA graphs, one for each size of a ladder: a step is one launch, however many kernels it has.

A graph reads its step from a buffer of its own, [tokens, ids, positions, …] as `step_plan` lays it out for its size, and
leaves the logits and the greedy choice where it always does. A step takes the smallest graph that it fits; the rows beyond
its own belong to the dummy slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from text_generation_shard.engines.torch.cuda.step_plan import Padding, StepPlan

UPDATES_A_TOKEN = 4
MIN_UPDATES = 32

Left = TypeVar("Left")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step leaves on the device."""

    normed: Tensor
    """[tokens, hidden]: what logits are made of."""
    logits: Tensor | None
    """float32 [choosing, vocabulary]; None if nothing is chosen."""
    chosen: Tensor | None
    """int32 [2 · n], n the tokens choosing or a few more, if chosen greedily: n token ids, and the bits of their
    log-probabilities."""


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    """The step it runs: int32, laid out for its size."""
    outcome: Outcome


class GraphPool:
    """Graphs that share their memory: only one of them runs at a time, and what it leaves is read before the next does."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, works: Sequence[Callable[[], Left]]) -> list[tuple[torch.cuda.CUDAGraph, Left]]:
        """A graph for each of `works`, and what it leaves on the device. They are done in their order, and may need that."""
        # Once outside: kernels are compiled, handles made, and memory taken that must not be the graphs'.
        for work in works:
            work()
        torch.cuda.synchronize()
        return [self._capture(work) for work in works]

    def _capture(self, work: Callable[[], Left]) -> tuple[torch.cuda.CUDAGraph, Left]:
        graph = torch.cuda.CUDAGraph()
        # NCCL has threads of its own, which may do what a capture forbids.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            left = work()
        return graph, left


def ladder(max_rows: int) -> list[int]:
    """Sizes of the graphs: dense where a padded row costs most."""
    sizes = [size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows]
    return [*sizes, max_rows]


class DecodeGraphs:
    """The graphs of a ladder. `run` computes the step whose numbers lie in a tensor on the device, as a plan says."""

    def __init__(
        self, max_rows: int, dummy_slot: int, dummy_update: tuple[int, int], run: Callable[[StepPlan, Tensor], Outcome]
    ) -> None:
        self._sizes = ladder(max_rows)
        self._paddings = [
            Padding(size, max(UPDATES_A_TOKEN * size, MIN_UPDATES), dummy_slot, dummy_update) for size in self._sizes
        ]
        self._run = run
        self._graphs: dict[int, _Graph] = {}

    def padding(self, rows: int, updates: int) -> Padding | None:
        """What to pad a decoding step to; None if no graph takes it."""
        for padding in islice(self._paddings, bisect_left(self._sizes, rows), None):
            if updates <= padding.updates:
                return padding if padding.tokens in self._graphs else None
        return None

    def capture(self, pool: GraphPool, *, only_largest: bool = False) -> None:
        """Capture the ladder, or its largest graph to see what memory that takes; the largest comes first: the others use
        its memory."""
        paddings: Iterable[Padding] = reversed(self._paddings)
        for padding in [self._paddings[-1]] if only_largest else paddings:
            plan = StepPlan.idle(padding)
            numbers = torch.from_numpy(plan.numbers).cuda()
            [(graph, outcome)] = pool.record([partial(self._run, plan, numbers)])
            self._graphs[padding.tokens] = _Graph(graph, numbers, outcome)

    def replay(self, plan: StepPlan, numbers: Tensor) -> Outcome | None:
        """Run a step by its graph; None if there is none for it. `numbers` are the plan's, in pinned memory."""
        graph = self._graphs.get(plan.sizes.tokens)
        if plan.sizes.chunks or graph is None or graph.numbers.shape != numbers.shape:
            return None
        graph.numbers.copy_(numbers, non_blocking=True)
        graph.graph.replay()
        # A graph always chooses greedily. Where that is not how a row chooses, it means nothing.
        return graph.outcome if plan.greedy else replace(graph.outcome, chosen=None)

    def __len__(self) -> int:
        return len(self._paddings)
