"""The replicas: which there are, which have room, and what they hold together."""

from __future__ import annotations

from text_generation_router.scheduling.batch import Batch
from text_generation_router.scheduling.entry import Entry
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.steps import ReplicaSpec


class Replicas:
    """The batches of the replicas that serve."""

    def __init__(self, policy: Policy, count: int) -> None:
        self._policy = policy
        self.batches: list[Batch | None] = [None] * count
        """By number; None: it is lost, or has yet to join."""
        self.roomy: dict[int, Batch] = {}
        """Those that may be given an entry, as `look_for_room` found."""
        self.crowded: dict[int, Batch] = {}
        """Those that may not, but only because of the prompts that they have to compute first."""
        self.changed: set[int] = set()
        """Those to be looked at again."""
        self.draining: set[int] = set()
        self._specs: list[ReplicaSpec | None] = [None] * count
        """What each can hold, or could when it was lost."""
        self._preemptions = 0
        """Of those that were lost since."""

    def open(self, replica: int, spec: ReplicaSpec) -> None:
        """`replica` joins."""
        assert self.batches[replica] is None, "a replica joins once"
        self.batches[replica] = Batch(replica, spec, self._policy)
        self._specs[replica] = spec
        self.draining.discard(replica)
        self.changed.add(replica)

    def lose(self, replica: int) -> Batch | None:
        """`replica` is gone; what it held, if it was there."""
        batch = self.batches[replica]
        if batch is not None:
            self.batches[replica] = None
            self.changed.add(replica)
            self._preemptions += batch.preemptions
        return batch

    def drain(self, replica: int, *, draining: bool) -> None:
        """Whether `replica` is to get nothing new."""
        (self.draining.add if draining else self.draining.discard)(replica)
        self.changed.add(replica)

    def look_for_room(self, waiting: int) -> None:
        """See which may be given one of `waiting` entries, if they have the blocks for it."""
        # With a ratio to keep, the length of the queue counts, too.
        for replica in range(len(self.batches)) if self._policy.waiting_served_ratio else self.changed:
            self.roomy.pop(replica, None)
            self.crowded.pop(replica, None)
            batch = self.batches[replica]
            if batch is not None and replica not in self.draining and batch.has_seat(waiting):
                (self.roomy if batch.has_prefill_room else self.crowded)[replica] = batch
        self.changed.clear()

    def fits(self, prompt_tokens: int, max_new_tokens: int) -> bool:
        """Whether such a request could run alone on one of them, be it one that is lost for now."""
        longest = prompt_tokens + max_new_tokens - 1
        return any(spec is not None and longest <= spec.num_blocks * spec.block_size for spec in self._specs)

    def may_hold(self, entry: Entry) -> bool:
        """Whether one that takes new entries could hold `entry`, if it had room."""
        return any(batch.can_hold(entry) for batch in self.serving if batch.replica not in self.draining)

    @property
    def serving(self) -> list[Batch]:
        """Those there are now."""
        return [batch for batch in self.batches if batch is not None]

    @property
    def block_size(self) -> int:
        """Tokens a KV block holds; 0 before any has joined."""
        return next((spec.block_size for spec in self._specs if spec is not None), 0)

    @property
    def preemptions(self) -> int:
        """Entries taken back to the queue, ever."""
        return self._preemptions + sum(batch.preemptions for batch in self.serving)
