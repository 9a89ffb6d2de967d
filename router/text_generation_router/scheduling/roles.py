"""Roles: with `prefill_replicas`, the replicas with the first numbers compute prompts, and the others decode.

A sequence that lacks LEAST_PROMPT tokens on the replicas that decode and on their host goes to one that computes prompts, others to
one that decodes; where none of the role has room, or serves, to the other role. Once its prompt is computed, its blocks are stored while
it goes on. Then it moves, and loads them, if a replica that decodes has room; else it decodes where it is.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from text_generation_router.scheduling.messages import StepOutput
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.sequence import ScheduledSequence, State

LEAST_PROMPT = 1024
"""Tokens to compute of a prompt that goes to a replica that computes prompts: fewer take less time than a move."""
LEAST_ANSWER = 16
"""Fewest new tokens left of a sequence that moves."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of the replicas. `replicas` (by number, None for one that does not serve) and `draining` are the scheduler's."""

    policy: Policy
    replicas: Mapping[int, ReplicaScheduler | None]
    draining: Set[int]

    def _able(self, sequence: ScheduledSequence) -> list[ReplicaScheduler]:
        """Return the replicas that get new sequences and can hold `sequence`."""
        available = [each for number, each in self.replicas.items() if number not in self.draining]
        return [each for each in available if each is not None and each.can_hold(sequence)]

    def is_prefill(self, replica: ReplicaScheduler) -> bool:
        """Return True for a replica that computes prompts."""
        return replica.replica < self.policy.prefill_replicas

    def needs_prefill(self, sequence: ScheduledSequence) -> bool:
        """Return True for a sequence that goes to a replica that computes prompts."""
        able = self._able(sequence)
        decoding = [each.cache for each in able if not self.is_prefill(each)]
        if not 0 < len(decoding) < len(able):
            return False
        known = [cache.tokens_on_device(sequence) for cache in decoding]
        hosts = ((cache, cache.host_of(sequence)) for cache in decoding[:1])
        known += [host.tree.peek(sequence.salt, cache.reusable_key(sequence)) for cache, host in hosts if host]
        return sequence.length - max(known) >= LEAST_PROMPT

    def movable(self, source: ReplicaScheduler) -> Iterator[ScheduledSequence]:
        """Yield the sequences of a draining replica that can be stored, and that another one of its host can hold."""
        for sequence in source.sequences:
            host = source.cache.host_of(sequence)
            if host and not sequence.loading and any(each.cache.host is host for each in self._able(sequence)):
                yield sequence

    def leaving(self, source: ReplicaScheduler, output: StepOutput) -> Iterator[ScheduledSequence]:
        """Let the sequences be stored whose prompts `source` has computed in a step. Yield those that are stored and go on elsewhere."""
        if not self.is_prefill(source) or source.cache.host is None or not source.cache.caching:
            return
        slots = {slot for slot, _ in output.prefilled}
        for sequence in [each for each in source.sequences if each.slot in slots and each not in source.prompts]:
            request, computed = sequence.request, sequence.prefill_length - sequence.cached_tokens
            # Without the host cache, and with scores of its prompt, it is computed again wherever it goes on.
            if source.cache.host_of(sequence) is None or request.logprobs.prompt:
                continue
            left = request.max_new_tokens - len(sequence.generated)
            if computed >= LEAST_PROMPT and left >= LEAST_ANSWER and self._has_room(sequence, source):
                source.copies.store(sequence, moves=True)
        stored, source.copies.stored = source.copies.stored, []
        for sequence in stored:
            is_here = sequence.replica == source.replica and sequence.state is State.RUNNING
            if is_here and self._has_room(sequence, source) and not self.needs_prefill(sequence):
                yield sequence

    def _has_room(self, sequence: ScheduledSequence, source: ReplicaScheduler) -> bool:
        """Return True if a replica of the host that decodes has room for a sequence of `source`."""
        decoding, host = (each for each in self._able(sequence) if not self.is_prefill(each)), source.cache.host
        return any(each.cache.host is host and each.may_place(1) and each.has_blocks(sequence) for each in decoding)
