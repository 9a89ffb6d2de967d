"""Entries that are set aside in the queue: their turn has come, but they are better off, or only can, later."""

from __future__ import annotations

from dataclasses import dataclass

from text_generation_router.request import RequestId
from text_generation_router.scheduling.entry import Entry, State
from text_generation_router.scheduling.queue import FairQueue


@dataclass(frozen=True, slots=True)
class Leader:
    """Whom entries wait for: it computes at a replica the first `tokens` tokens of theirs."""

    entry: Entry
    replica: int
    tokens: int

    @property
    def computes(self) -> bool:
        entry = self.entry
        return (
            entry.state in (State.PLACED, State.RUNNING)
            and entry.replica == self.replica
            and entry.prefilled < self.tokens
        )


class Aside:
    """Those of one queue."""

    def __init__(self, queue: FairQueue[Entry]) -> None:
        self._queue = queue
        self._followers: dict[Leader, list[Entry]] = {}
        self._homeless: dict[RequestId, Entry] = {}

    def wait_for(self, leader: Leader) -> None:
        """Whose turn it is waits until `leader` has computed the beginning that they share."""
        self._followers.setdefault(leader, []).append(self._queue.skip())

    def wait_for_a_home(self) -> None:
        """Only a replica that is lost for now, or drains, could hold whose turn it is: the others go on."""
        entry = self._queue.skip()
        self._homeless[entry.request.id] = entry

    def forget(self, entry: Entry) -> None:
        """`entry` is over."""
        self._homeless.pop(entry.request.id, None)

    def recall(self) -> None:
        """Those who waited for a prefix that is there now, or never will be, have their turns again."""
        for leader in [leader for leader in self._followers if not leader.computes]:
            self._queue.unskip(self._followers.pop(leader))

    def house(self) -> None:
        """Replicas changed: one of them may be able to hold what none could."""
        self._queue.unskip(self._homeless.values())
        self._homeless.clear()
