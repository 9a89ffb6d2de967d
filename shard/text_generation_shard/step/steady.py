"""Sequences in steady decoding, in columns: one token a step, the most probable one, and nothing else is asked of them.

Most steps of a busy engine consist of these. Where such a sequence is hangs on the number of steps alone, and the device
knows its last token: so that a step costs the host a few operations on arrays, and no walk over objects. What they have
chosen is not kept here; whoever orders knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from text_generation_shard.step.sequence import Row, Sequence

Ints = NDArray[np.int32]


@dataclass(slots=True)
class SteadyRows:
    """The part of one or more steady sequences in a step: each computes one position, and the token after it is chosen."""

    sequences: list[Sequence]
    slots: Ints
    starts: Ints
    """The positions."""
    lasts: Ints
    """`Sequence.last` of each."""
    enders: frozenset[int]
    """Every token that may end one of them."""
    changed: list[Sequence]
    """Sequences, here or not, that have come or were granted blocks since the step before."""
    epoch: int
    """How often sequences had left when the step was made up."""

    def __len__(self) -> int:
        return len(self.sequences)

    def not_held(self) -> list[int]:
        """Places of those that are gone."""
        return [place for place, sequence in enumerate(self.sequences) if not sequence.is_held]

    def remarkable(self, token_ids: list[int]) -> list[int]:
        """Places of those that may have ended with these tokens."""
        places: list[int] = np.flatnonzero(self.starts + 1 >= self.lasts).tolist()
        if not self.enders.isdisjoint(token_ids):
            places += [place for place, token_id in enumerate(token_ids) if token_id in self.enders]
        return places


@dataclass(slots=True)
class StepRows:
    """What a step computes: steady sequences first, then others that decode, then chunks of prompts."""

    steady: SteadyRows | None
    others: list[Row]

    def __len__(self) -> int:
        return self.num_steady + len(self.others)

    @property
    def num_steady(self) -> int:
        return 0 if self.steady is None else len(self.steady)

    @property
    def tokens(self) -> int:
        """Positions that it computes."""
        return self.num_steady + sum(row.length for row in self.others)

    @property
    def prefills(self) -> bool:
        """Whether it computes some of a prompt."""
        return bool(self.others) and self.others[-1].prefills

    @property
    def num_sampling(self) -> int:
        """How many choose a token."""
        return self.num_steady + sum(row.samples for row in self.others)

    @property
    def sampling(self) -> list[Row]:
        """Those of the others whose next token is chosen."""
        return [row for row in self.others if row.samples]

    @property
    def sequences(self) -> list[Sequence]:
        """All of them."""
        return [*(() if self.steady is None else self.steady.sequences), *(row.sequence for row in self.others)]


class SteadyTable:
    """Who decodes steadily, and how far they are: `Sequence.computed` says that no more."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._columns = np.empty((4, 0), dtype=np.int32)
        """In the same order: slot, positions computed or under way, and of each sequence `end` and `last`."""
        self._places = np.empty(0, dtype=np.int32)
        """By slot."""
        self._enders: frozenset[int] = frozenset()
        self._coming: list[Sequence] = []
        self._changed: list[Sequence] = []
        self._some_left = False
        self._epoch = 0

    def join(self, sequence: Sequence) -> None:
        """It is one of them from the next step on."""
        self._coming.append(sequence)

    def grant(self, sequence: Sequence) -> None:
        """It has more blocks."""
        self._changed.append(sequence)

    def leave(self) -> None:
        """Some are not held any more."""
        self._some_left = True
        self._epoch += 1

    def rows(self) -> SteadyRows | None:
        """Those with room in their grant; None if there are none."""
        if self._some_left:
            self._forget()
        if self._coming:
            self._take()
        slots, computed, ends, lasts = self._columns
        for sequence in self._changed:
            if sequence.is_held:
                ends[self._places[sequence.slot]] = sequence.end
        has_room = computed < ends
        sequences, starts = self._sequences, computed.copy()
        if not has_room.all():
            slots, starts, lasts = slots[has_room], starts[has_room], lasts[has_room]
            sequences = [sequences[place] for place in np.flatnonzero(has_room).tolist()]
        if not sequences:
            return None
        return SteadyRows(sequences, slots, starts, lasts, self._enders, self._changed, self._epoch)

    def begin(self, rows: SteadyRows) -> None:
        """The step of these rows is under way."""
        computed = self._columns[1]
        if len(rows) == len(computed):
            computed += 1
        else:
            computed[self._places[rows.slots]] += 1
        self._changed = []

    def has_lost(self, rows: SteadyRows) -> bool:
        """Whether some may have left since the step was made up."""
        return rows.epoch != self._epoch

    def _forget(self) -> None:
        held = np.fromiter((sequence.is_held for sequence in self._sequences), dtype=np.bool_)
        self._columns = self._columns[:, held]
        self._sequences, self._coming, self._changed = (
            [sequence for sequence in some if sequence.is_held]
            for some in (self._sequences, self._coming, self._changed)
        )
        self._some_left = False
        self._number()

    def _take(self) -> None:
        coming, self._coming = self._coming, []
        rows = [(sequence.slot, sequence.computed, sequence.end, sequence.last) for sequence in coming]
        self._columns = np.concatenate((self._columns, np.array(rows, dtype=np.int32).T), axis=1)
        self._sequences = self._sequences + coming  # rows that were given out keep the list they have
        self._changed += coming
        self._number()

    def _number(self) -> None:
        """Say again who is where."""
        slots = self._columns[0]
        if len(slots) and (most := int(slots.max())) >= len(self._places):
            self._places = np.empty(2 * most + 1, dtype=np.int32)
        self._places[slots] = np.arange(len(slots), dtype=np.int32)
        self._enders = frozenset().union(*{sequence.enders for sequence in self._sequences})
