"""Roles: with `prefill_replicas`, the replicas with the first numbers compute prompts, and the others decode.

A sequence that lacks LEAST_PROMPT tokens on the replicas that decode and on their host goes to one that computes prompts, others to
one that decodes; where none of the role has room, or serves, to the other role. Once its prompt is computed, its blocks are stored while
it goes on. Then it moves, and loads them, if a replica that decodes has room; else it decodes where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from text_generation_router.scheduling.host_cache import HostCache
from text_generation_router.scheduling.messages import StepOutput
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.sequence import ScheduledSequence, State

LEAST_PROMPT = 1024
"""Tokens to compute of a prompt that goes to a replica that computes prompts: fewer take less time than a move."""
LEAST_ANSWER = 16
"""Fewest new tokens left of a sequence that moves."""

Replicas = Mapping[int, ReplicaScheduler]


class Roles:
    """The roles of the replicas. `replicas` (by number, None for one that does not serve) and `draining` are the scheduler's."""

    def __init__(self, policy: Policy, replicas: Mapping[int, ReplicaScheduler | None], draining: Set[int]) -> None:
        self._count = policy.prefill_replicas
        self._replicas = replicas
        self._draining = draining

    def _available(self, *, prefill: bool) -> Iterator[ReplicaScheduler]:
        """Yield the replicas of a role that get new sequences."""
        for number, replica in self._replicas.items():
            if replica is not None and number not in self._draining and self.is_of(number, prefill=prefill):
                yield replica

    def is_prefill(self, sequence: ScheduledSequence) -> bool:
        """Return True if `sequence` goes to a replica that computes prompts."""
        if not self._count or not any(each.can_hold(sequence) for each in self._available(prefill=True)):
            return False
        decoding = [each.cache for each in self._available(prefill=False) if each.can_hold(sequence)]
        known = [each.tokens_on_device(sequence) for each in decoding]
        known += [each.host.tree.peek(sequence.salt, each.reusable_key(sequence)) for each in decoding[:1] if each.host]
        return bool(known) and sequence.length - max(known) >= LEAST_PROMPT

    def is_of(self, replica: int, *, prefill: bool) -> bool:
        """Return True if a replica has a role."""
        return (replica < self._count) is prefill

    def split(self, replicas: Replicas, *, prefill: bool) -> tuple[Replicas, Replicas]:
        """Return those of `replicas` that have a role, and the others."""
        own = {number: each for number, each in replicas.items() if self.is_of(number, prefill=prefill)}
        return own, {number: each for number, each in replicas.items() if number not in own}

    def movable(self, source: ReplicaScheduler) -> Iterator[ScheduledSequence]:
        """Yield the sequences of a draining replica that another one of its host can hold."""
        others = [
            each
            for role in (False, True)
            for each in self._available(prefill=role)
            if each.cache.host is source.cache.host
        ]
        if source.cache.host is not None:
            for sequence in source.sequences:
                if not sequence.loading and any(other.can_hold(sequence) for other in others):
                    yield sequence

    def leaving(self, source: ReplicaScheduler, output: StepOutput) -> Iterator[ScheduledSequence]:
        """Let the sequences be stored whose prompts `source` has computed in a step. Yield those that are stored and go on elsewhere."""
        cache, host = source.cache, source.cache.host
        if source.replica >= self._count or host is None or not cache.caching:
            return
        for sequence in filter(None, [source.sequence_in(slot) for slot, _ in output.prefilled]):
            lacked = sequence.prefill_length - sequence.cached_tokens
            left = sequence.request.max_new_tokens - len(sequence.generated)
            has_prompt = sequence.state is State.RUNNING and sequence not in source.prompts
            if sequence.request.replayed or not has_prompt:
                continue
            if lacked >= LEAST_PROMPT and left >= LEAST_ANSWER and self._has_room(sequence, host):
                source.copies.store(sequence, moves=True)
        stored, source.copies.stored = source.copies.stored, []
        for sequence in stored:
            is_here = sequence.replica == source.replica and sequence.state is State.RUNNING
            if is_here and self._has_room(sequence, host) and not self.is_prefill(sequence):
                yield sequence

    def _has_room(self, sequence: ScheduledSequence, host: HostCache) -> bool:
        """Return True if a replica of the host that decodes has room for `sequence`."""
        decoding = (each for each in self._available(prefill=False) if each.cache.host is host)
        return any(each.may_place(1) and each.has_blocks(sequence) for each in decoding)
