"""Entries that are set aside in the queue: their turn has come, but they are better off, or only can, later."""

from __future__ import annotations

from dataclasses import dataclass

from text_generation_router.request import RequestId
from text_generation_router.scheduling.batch import Batch
from text_generation_router.scheduling.entry import Entry, State
from text_generation_router.scheduling.queue import FairQueue


@dataclass(frozen=True, slots=True)
class Leader:
    """Whom entries wait for: it computes at a replica the first `tokens` tokens of theirs."""

    entry: Entry
    replica: int
    tokens: int

    @property
    def lasts(self) -> bool:
        entry = self.entry
        return (
            entry.state in (State.PLACED, State.RUNNING)
            and entry.replica == self.replica
            and entry.prefilled < self.tokens
        )


@dataclass(frozen=True, slots=True)
class Crowd:
    """Prompts that are before an entry at the replica that it had better go to."""

    batch: Batch

    @property
    def lasts(self) -> bool:
        return not self.batch.is_lost and not self.batch.has_prefill_room


class Aside:
    """Those of one queue."""

    def __init__(self, queue: FairQueue[Entry]) -> None:
        self._queue = queue
        self._waiting: dict[Leader | Crowd, list[Entry]] = {}
        self._homeless: dict[RequestId, Entry] = {}

    def wait_for(self, end_of: Leader | Crowd) -> None:
        """Whose turn it is waits while `end_of` lasts."""
        self._waiting.setdefault(end_of, []).append(self._queue.skip())

    def wait_for_a_home(self) -> None:
        """Only a replica that is lost for now, or drains, could hold whose turn it is: the others go on."""
        entry = self._queue.skip()
        self._homeless[entry.request.id] = entry

    def forget(self, entry: Entry) -> None:
        """`entry` is over."""
        self._homeless.pop(entry.request.id, None)

    def recall(self) -> None:
        """Those who need wait no longer have their turns again."""
        for over in [one for one in self._waiting if not one.lasts]:
            self._queue.unskip(self._waiting.pop(over))

    def house(self) -> None:
        """Replicas changed: one of them may be able to hold what none could."""
        self._queue.unskip(self._homeless.values())
        self._homeless.clear()
