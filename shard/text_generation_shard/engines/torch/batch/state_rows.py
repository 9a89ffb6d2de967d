"""The tokens of a step by sequence, for layers whose state depends on all earlier tokens of a sequence."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from text_generation_shard.engines.torch.batch.step_plan import STATE_COLUMNS, StepPlan

PIECE = 64
"""Most tokens of a chunk that recurrences compute at a time, by products of matrices."""


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
    checkpoint: int = 0
    """The block of the state before its last `rest` tokens, if `rest` is not 0."""
    rest: int = 0

    @property
    def parts(self) -> "tuple[StateChunk, ...]":
        """The chunks before and after its checkpoint, or the chunk itself."""
        if not self.rest:
            return (self,)
        before = self.length - self.rest
        after = StateChunk(self.checkpoint, self.write, self.start + before, self.first + before, self.rest)
        return StateChunk(self.read, self.checkpoint, self.start, self.first, before), after


Places = Tensor | slice


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Decode rows and the places of their tokens."""

    blocks: Tensor
    """int64 [rows], like the following: those of the first tokens."""
    positions: Tensor
    behind: Tensor
    most_behind: int
    tokens: list[tuple[Places, Places, Places]]
    """For the first token, the first draft and so on: the token of each row, or its last one; which rows have it; these tokens."""


@dataclass(frozen=True, eq=False)
class StateRows:
    """The tokens of a step in the order of its plan: one of each decode row and its drafts, then those of the chunks.

    Decode rows update their states by their first token. The block of a state keeps what its layer needs to add the drafts
    behind it; the next step adds those that were right before its first token.
    """

    decoding: int
    """Number of tokens of decode rows."""
    blocks: Tensor
    """int32 [decoding]: the block of the state of each."""
    positions: Tensor
    """int32 [tokens]."""
    behind: Tensor
    """int32 [tokens]: for the first token of a decode row, the tokens before it that are not in its state."""
    chunks: tuple[StateChunk, ...] = ()
    ends: Tensor | None = None
    """int32 [chunks + 1]: the first token of each chunk, and the end of the last, after the decode rows."""
    reads: Tensor | None = None
    writes: Tensor | None = None
    """int32 [chunks]: the blocks of the states before and after each."""
    checkpoints: Tensor | None = None
    rests: Tensor | None = None
    """int32 [chunks]: see `StateChunk`."""
    places: Tensor | None = None
    """int64 [tokens]: the index in the plan of each token in the order of the step; None: the order is that of the plan."""

    def in_plan_order(self, values: Tensor) -> Tensor:
        """Return `values` [tokens, …] of the step in the order of the plan."""
        return values if self.places is None else torch.empty_like(values).index_copy_(0, self.places, values)

    def in_step_order(self, values: Tensor) -> Tensor:
        """Return `values` [tokens, …] of the plan in the order of the step."""
        return values if self.places is None else values[self.places]

    @cached_property
    def decode_rows(self) -> DecodeRows:
        """The decode rows, for operations in plain torch."""
        is_first = torch.ones_like(self.blocks, dtype=torch.bool)
        is_first[1:] = self.blocks[1:] != self.blocks[:-1]
        firsts = is_first.nonzero().flatten()
        lengths = torch.diff(firsts, append=firsts.new_tensor([self.decoding]))
        blocks, positions, behind = (each[firsts].long() for each in (self.blocks, self.positions, self.behind))
        numbers = blocks, positions, behind, int(behind.max())
        if len(firsts) == self.decoding:
            every = slice(0, self.decoding)
            return DecodeRows(*numbers, [(every, every, every)])
        has_token = [lengths > place for place in range(int(lengths.max()))]
        tokens = [firsts + lengths.clamp(max=place + 1) - 1 for place in range(len(has_token))]
        own = [each[has] for each, has in zip(tokens, has_token, strict=True)]
        return DecodeRows(*numbers, list(zip(tokens, has_token, own, strict=True)))

    @cached_property
    def parts(self) -> list[StateChunk]:
        """The parts of all chunks, each after those whose states it reads."""
        return [part for chunk in self.chunks for part in chunk.parts]

    @cached_property
    def longest_chunk(self) -> int:
        return max(chunk.length for chunk in self.chunks)

    @cached_property
    def most_pieces(self) -> int:
        """The most pieces of a chunk; none has tokens before and after a checkpoint."""
        return max(-(-(chunk.length - chunk.rest) // PIECE) - (-chunk.rest // PIECE) for chunk in self.chunks)


def state_chunks(plan: StepPlan) -> tuple[StateChunk, ...]:
    if not plan.sizes.chunks:
        return ()
    positions, ends = plan.column("positions"), (plan.column("query_indptr") + plan.num_decoding).tolist()
    reads, writes, checkpoints, rests = (plan.column(name).tolist() for name in STATE_COLUMNS)
    return tuple(
        StateChunk(read, write, int(positions[first]), first, end - first, checkpoint, rest)
        for read, write, checkpoint, rest, (first, end) in zip(
            reads, writes, checkpoints, rests, pairwise(ends), strict=True
        )
    )
