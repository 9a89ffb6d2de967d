"""Replays: sequences that compute served texts again, beside the queue: no tenant pays for one, and none waits behind one.

A replay leaves as soon as it is cancelled, preempted, or its replica is lost; it is never requeued. It reuses no cached prefix
and leaves nothing in the prefix cache.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from text_generation_router.request import Request
from text_generation_router.scheduling.messages import Deliveries
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.sequence import ScheduledSequence, State

ARRIVAL = 1 << 60
"""Later than all requests: of the lowest priority, a replay is the first to be preempted."""


@dataclass(eq=False)
class Replays:
    """At most one replay at a time. `replicas` and `draining` are the scheduler's."""

    replicas: Mapping[int, ReplicaScheduler | None]
    draining: Set[int]
    running: ScheduledSequence | None = None
    """The one that has a slot."""

    @property
    def replica(self) -> int | None:
        """The replica of the one that has a slot: the times of its steps say nothing about the requests of clients."""
        return None if self.running is None else self.running.replica

    def start(self, request: Request, served_by: int) -> int | None:
        """Place a replay on a replica that has room, on `served_by` only if no other has.

        Return the replica; None if there is none, or another replay.
        """
        if self.running is not None:
            return None
        sequence = ScheduledSequence(request, ARRIVAL, 0.0, 1)
        usable = [each for each in self.replicas.values() if each is not None and each.replica not in self.draining]
        for replica in sorted(usable, key=lambda each: (each.replica == served_by, each.occupied_slots)):
            if replica.may_place(1) and replica.has_prefill_room and replica.place(sequence):
                self.running = sequence
                break
        return self.replica

    def cancel(self) -> int | None:
        """Cancel the replay. Return its replica: the slot is free once its release was applied; None if nothing changes."""
        if (sequence := self.running) is None or sequence.state is State.CANCELLED:
            return None
        number = sequence.replica
        replica = self.replicas[number]
        assert replica is not None, "a lost replica has no replay"
        replica.drop(sequence)
        if sequence.slot < 0:  # it was not sent
            self.running = None
        return number

    def forget(self, left: Sequence[ScheduledSequence], deliveries: Deliveries) -> Sequence[ScheduledSequence]:
        """Forget the replay if it is among the sequences that left a replica, and its token; return the others."""
        if (replay := self.running) is None:
            return left
        deliveries.tokens = [each for each in deliveries.tokens if each[0] != replay.id]
        if replay in left:
            self.running = None
        return [sequence for sequence in left if sequence is not replay]
