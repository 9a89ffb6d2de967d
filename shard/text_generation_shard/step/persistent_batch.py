"""The persistent batch: greedy decoding sequences, kept in columns from step to step.

Most steps of a busy engine consist of these. Each decodes one token a step, greedily, with nothing else requested. Its position
depends only on the number of steps, and the device has its last token. A step costs the host a few array operations instead of
a loop over objects. The tokens are not stored here; the router has them. A sequence leaves for a step in which it has drafts.
"""

import numpy as np

from text_generation_shard.step.sequence import PersistentRows, Sequence


class PersistentBatch:
    """Columns of the sequences in the batch. `Sequence.computed` is not updated while a sequence is here."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._columns = np.empty((4, 0), dtype=np.int32)
        """In the same order: slot, positions computed or in progress, `Sequence.end`, `Sequence.last`."""
        self._index_of_slot = np.empty(0, dtype=np.int32)
        self._stop_ids: frozenset[int] = frozenset()
        self._joining: list[Sequence] = []
        self._changed: list[Sequence] = []
        self._leaving: set[int] = set()
        """Slots."""
        self._has_dropped = False
        self._epoch = 0

    def join(self, sequence: Sequence) -> None:
        """Add a sequence from the next step on."""
        self._joining.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from the next step on; no step with it may be in progress."""
        self._leaving.add(sequence.slot)
        self._has_dropped = True

    def extend(self, sequence: Sequence) -> None:
        """Note that a sequence got blocks."""
        self._changed.append(sequence)

    def on_dropped(self) -> None:
        """Note that a sequence is no longer held."""
        self._has_dropped = True
        self._epoch += 1

    def rows(self) -> PersistentRows | None:
        """Return the rows of the next step: all sequences with room in their blocks. None if there are none."""
        if self._has_dropped:
            self._remove_dropped()
        if self._joining:
            self._add_joining()
        slots, computed, ends, lasts = self._columns
        for sequence in self._changed:
            if sequence.is_held:
                ends[self._index_of_slot[sequence.slot]] = sequence.end
        has_room = computed < ends
        sequences, starts = self._sequences, computed.copy()
        if not has_room.all():
            slots, starts, lasts = slots[has_room], starts[has_room], lasts[has_room]
            sequences = [sequences[index] for index in np.flatnonzero(has_room).tolist()]
        if not sequences:
            return None
        return PersistentRows(sequences, slots, starts, lasts, self._stop_ids, self._changed, self._epoch)

    def begin(self, rows: PersistentRows) -> None:
        """Count the positions of a started step as computed."""
        computed = self._columns[1]
        if len(rows) == len(computed):
            computed += 1
        else:
            computed[self._index_of_slot[rows.slots]] += 1
        self._changed = []

    def dropped_since(self, rows: PersistentRows) -> bool:
        """Return True if sequences were dropped after the step was built."""
        return rows.epoch != self._epoch

    def _remove_dropped(self) -> None:
        leaving = self._leaving
        held = np.fromiter((each.is_held and each.slot not in leaving for each in self._sequences), dtype=np.bool_)
        self._columns = self._columns[:, held]
        self._sequences, self._joining, self._changed = (
            [each for each in sequences if each.is_held and each.slot not in leaving]
            for sequences in (self._sequences, self._joining, self._changed)
        )
        self._leaving, self._has_dropped = set(), False
        self._index()

    def _add_joining(self) -> None:
        joining, self._joining = self._joining, []
        rows = [(sequence.slot, sequence.computed, sequence.end, sequence.last) for sequence in joining]
        self._columns = np.concatenate((self._columns, np.array(rows, dtype=np.int32).T), axis=1)
        self._sequences = self._sequences + joining  # a new list: earlier rows keep theirs
        self._changed += joining
        self._index()

    def _index(self) -> None:
        """Rebuild what is derived from the set of sequences."""
        slots = self._columns[0]
        if len(slots) and (largest := int(slots.max())) >= len(self._index_of_slot):
            self._index_of_slot = np.empty(2 * largest + 1, dtype=np.int32)
        self._index_of_slot[slots] = np.arange(len(slots), dtype=np.int32)
        self._stop_ids = frozenset().union(*{sequence.stop_ids for sequence in self._sequences})
