"""The pieces of a forward pass as CUDA graphs, for steps with chunks of prompts: see `forward`.

A step of a few hundred tokens is computed sooner than its hundreds of kernels are launched. Of these only attention has to be:
its shapes are new in each step, and FlashInfer plans it on the host. What lies between is a graph, in one set for each of a
few numbers of tokens. A step takes the smallest set that it fits; the tokens beyond its own belong to the dummy slot,
and attention does not see them. Larger steps than the largest set's keep the device busy by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from text_generation_shard.engines.torch.cuda.forward import DeviceStep, Forward, Pass

BUCKETS = (16, 32, 64, *range(128, 1025, 64))
"""Tokens of a set, of which those beyond a step's are computed for nothing."""
PIECES_A_GRAPH = 16
"""So many pieces weigh as much as the graph of a whole step, as far as the driver's own memory goes."""

Work = Callable[[], None]
Recorder = Callable[[list[Work]], list[Work]]
"""Makes of work on the device what does the same again, in the same memory. May do the work."""


@dataclass(frozen=True, slots=True)
class _Set:
    work: Pass
    """Over as many tokens as the bucket says."""
    pieces: list[Work]


class Pieces:
    """Sets of pieces in the same memory. `cache` has a layer in each place. All is called in inference mode."""

    def __init__(self, forward: Forward, cache: Sequence[Tensor], dummy_slot: int) -> None:
        self._forward = forward
        self._cache = cache
        self._padding = torch.tensor([[0], [0], [dummy_slot]], dtype=torch.int32, device=cache[0].device)
        """A token of no sequence: its id, its position, its slot."""
        self._columns = self._padding.repeat(1, BUCKETS[-1])
        self._activations = forward.activations(BUCKETS[-1])
        # Nothing is attended to for padding: what an earlier step left is as good as this.
        self._activations.attended.zero_()
        self._sets: dict[int, _Set] = {}

    def record(self, record: Recorder, *, only_largest: bool = False) -> None:
        """Make all sets, or the largest to see what memory that takes; it comes first: the others use its memory."""
        for tokens in [BUCKETS[-1]] if only_largest else reversed(BUCKETS):
            work = self._forward.begin(self._columns[:, :tokens], self._cache, self._activations.first(tokens))
            pieces: list[Work] = [
                partial(self._forward.piece, index, work) for index in range(self._forward.num_pieces)
            ]
            self._sets[tokens] = _Set(work, record(pieces))

    def run(self, step: DeviceStep) -> Tensor | None:
        """As `Forward` does: normed hidden states [tokens, hidden], until the next step; None if no set takes the step."""
        tokens = step.tokens
        bucket = bucket_for(tokens)
        if bucket not in self._sets:
            return None
        found = self._sets[bucket]
        self._columns[:, :tokens].copy_(step.columns)
        if tokens < bucket:
            self._columns[:, tokens:bucket].copy_(self._padding)
        attend = self._forward.attention(found.work, tokens, step.decoding)
        for index, piece in enumerate(found.pieces):
            if index:
                attend(index - 1)
            piece()
        return self._activations.normed[:tokens]

    def __len__(self) -> int:
        """How many graphs of whole steps a full set of these is to be counted as."""
        return len(BUCKETS) * -(-self._forward.num_pieces // PIECES_A_GRAPH)


def bucket_for(tokens: int) -> int:
    """The smallest of BUCKETS that so many tokens fit; the number itself, which is none of them, if they are too many."""
    return next((bucket for bucket in BUCKETS if tokens <= bucket), tokens)
