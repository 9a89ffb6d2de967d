"""The rows of a step, one per sequence, and the tokens sampled for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from text_generation_proto.values import FailureCode
from text_generation_shard.step.sequence import Sequence

Ints = NDArray[np.int32]


@dataclass(slots=True)
class StepRow:
    """The part of one sequence in a step: positions [start, start + length)."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    """True if the step also samples the token after the last of these positions."""

    @property
    def prefills(self) -> bool:
        """True if the positions belong to the prompt."""
        return self.start < self.sequence.prompt_length


@dataclass(slots=True)
class PersistentRows:
    """The rows of the persistent batch in one step: each computes one position and samples the token after it."""

    sequences: list[Sequence]
    slots: Ints
    starts: Ints
    """The positions."""
    lasts: Ints
    """`Sequence.last` of each."""
    stop_ids: frozenset[int]
    """Union of the sequences' stop ids."""
    changed: list[Sequence]
    """Sequences that joined or got blocks since the previous step; not all are in this one."""
    epoch: int
    """Number of removals from the batch before this step was built."""

    def __len__(self) -> int:
        return len(self.sequences)

    def dropped(self) -> list[int]:
        """Return the indices of sequences that were dropped since the step was built."""
        return [index for index, sequence in enumerate(self.sequences) if not sequence.is_held]

    def may_finish(self, token_ids: list[int]) -> list[int]:
        """Return the indices of sequences that these tokens may end."""
        indices: list[int] = np.flatnonzero(self.starts + 1 >= self.lasts).tolist()
        if not self.stop_ids.isdisjoint(token_ids):
            indices += [index for index, token_id in enumerate(token_ids) if token_id in self.stop_ids]
        return indices


@dataclass(slots=True)
class StepRows:
    """All rows of a step: the persistent batch, then other decoding rows, then prompt chunks."""

    persistent: PersistentRows | None
    others: list[StepRow]

    def __len__(self) -> int:
        return self.num_persistent + len(self.others)

    @property
    def num_persistent(self) -> int:
        return 0 if self.persistent is None else len(self.persistent)

    @property
    def tokens(self) -> int:
        """Number of positions to compute."""
        return self.num_persistent + sum(row.length for row in self.others)

    @property
    def prefills(self) -> bool:
        """True if the step computes prompt tokens."""
        return bool(self.others) and self.others[-1].prefills

    @property
    def num_sampling(self) -> int:
        """Number of rows that sample a token."""
        return self.num_persistent + sum(row.samples for row in self.others)

    @property
    def sampling(self) -> list[StepRow]:
        """The rows outside the persistent batch that sample a token."""
        return [row for row in self.others if row.samples]

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences of all rows."""
        return [*(() if self.persistent is None else self.persistent.sequences), *(row.sequence for row in self.others)]


@dataclass(slots=True)
class SamplerOutput:
    """The tokens of the rows that sample, in columns, in the order of the rows."""

    token_ids: list[int]
    logprobs: list[float]
    failures: dict[int, tuple[FailureCode, str]] = field(default_factory=dict)
    """By index: the reason why there is no token."""
    grammar_ended: set[int] = field(default_factory=set)
    """Indices of rows whose grammar is complete: the sequence ends with this token."""
