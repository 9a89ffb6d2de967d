"""Replays: sequences that compute served texts again, beside the queue: no tenant pays for one, and none waits behind one.

A replay leaves as soon as it is cancelled, preempted, or its replica is lost; it is never requeued. It reuses no cached prefix
and leaves nothing in the prefix cache.
"""

from collections.abc import Mapping, Sequence, Set

from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.messages import Deliveries
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.sequence import ScheduledSequence, State

FIRST_ARRIVAL = 1 << 60
"""Later than all requests, plus the negative of its number: of the lowest priority, a replay is the first to be preempted."""


class Replays:
    """The replays that have a slot: at most one on each replica. `replicas` and `draining` are the scheduler's."""

    def __init__(self, replicas: Mapping[int, ReplicaScheduler | None], draining: Set[int]) -> None:
        self._replicas = replicas
        self._draining = draining
        self._sequences: dict[RequestId, ScheduledSequence] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def replicas(self) -> set[int]:
        """The replicas that have one: the times of their steps say nothing about the requests of clients."""
        return {sequence.replica for sequence in self._sequences.values()}

    def start(self, request: Request, served_by: int) -> int | None:
        """Place a replay on a replica that has room, on `served_by` only if no other has.

        Return the replica; None if there is none.
        """
        sequence = ScheduledSequence(request, FIRST_ARRIVAL - request.id, 0.0, 1)
        serving = [each for each in self._replicas.values() if each is not None]
        for replica in sorted(serving, key=lambda each: (each.replica == served_by, each.occupied_slots)):
            is_able = replica.may_place(1) and replica.has_prefill_room
            if replica.replica not in self.replicas | self._draining and is_able and replica.place(sequence):
                self._sequences[request.id] = sequence
                return replica.replica
        return None

    def cancel(self) -> list[int]:
        """Cancel all replays. Return their replicas: a slot is free once its release was applied."""
        numbers: list[int] = []
        for sequence in [each for each in self._sequences.values() if each.state is not State.CANCELLED]:
            numbers.append(sequence.replica)
            replica = self._replicas[sequence.replica]
            assert replica is not None, "a lost replica has no replays"
            replica.drop(sequence)
            if sequence.slot < 0:  # it was not sent
                del self._sequences[sequence.id]
        return numbers

    def forget(self, left: Sequence[ScheduledSequence], deliveries: Deliveries) -> Sequence[ScheduledSequence]:
        """Forget the replays among the sequences that left a replica, and their tokens; return the others."""
        if not self._sequences:
            return left
        deliveries.tokens = [each for each in deliveries.tokens if each[0] not in self]
        for sequence in left:
            self._sequences.pop(sequence.id, None)
        return [sequence for sequence in left if not sequence.request.replayed]
