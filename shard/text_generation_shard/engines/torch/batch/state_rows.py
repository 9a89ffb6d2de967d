"""The tokens of a step by sequence, for layers whose state depends on all earlier tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from text_generation_shard.engines.torch.batch.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class StateChunk:
    """The tokens of a sequence in a step: [first, first + length) of the plan."""

    read: int
    """The block of the state before it."""
    write: int
    """The block of the state after it."""
    start: int
    """Position of the first token; at 0 the state starts from zeros, whatever the block holds."""
    first: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """The tokens of a step in the order of its plan: one of each decode row, then those of the chunks."""

    decoding: int
    """Number of decode rows."""
    blocks: Tensor
    """int32 [decode rows]: the block of the state of each."""
    positions: Tensor
    """int32 [tokens]."""
    chunks: tuple[StateChunk, ...] = ()
    ends: Tensor | None = None
    """int32 [chunks + 1]: the first token of each chunk, and the end of the last, after the decode rows."""
    reads: Tensor | None = None
    writes: Tensor | None = None
    """int32 [chunks]: the blocks of the states before and after each."""
    places: Tensor | None = None
    """int64 [tokens]: the index in the plan of each token in the order of the step; None: the order is that of the plan."""

    def in_plan_order(self, values: Tensor) -> Tensor:
        """Return `values` [tokens, …] of the step in the order of the plan."""
        return values if self.places is None else torch.empty_like(values).index_copy_(0, self.places, values)

    def in_step_order(self, values: Tensor) -> Tensor:
        """Return `values` [tokens, …] of the plan in the order of the step."""
        return values if self.places is None else values[self.places]

    @property
    def longest_chunk(self) -> int:
        """Number of tokens of the longest chunk."""
        return max(chunk.length for chunk in self.chunks)


def state_chunks(plan: StepPlan) -> tuple[StateChunk, ...]:
    """Return the chunks of a plan."""
    if not plan.sizes.chunks:
        return ()
    positions, reads, writes = (plan.column(name) for name in ("positions", "state_reads", "state_writes"))
    ends = (plan.column("query_indptr") + plan.num_decoding).tolist()
    return tuple(
        StateChunk(read, write, int(positions[first]), first, end - first)
        for read, write, (first, end) in zip(reads.tolist(), writes.tolist(), pairwise(ends), strict=True)
    )
