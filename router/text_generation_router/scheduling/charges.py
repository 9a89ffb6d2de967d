"""The tokens that tenants are charged for their sequences, and the prompt tokens that replicas have computed or found."""

from text_generation_router.scheduling.queue import FairQueue
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.sequence import ScheduledSequence


def charge_first_start(sequence: ScheduledSequence, replica: ReplicaScheduler, queue: FairQueue) -> None:
    """Charge the tenant of a sequence that was placed on `replica`, unless it was placed before."""
    if sequence.charged_tokens:
        return
    if sequence.resumed:  # charged for the rest where it ran before
        sequence.charged_tokens = sequence.expected_new_tokens - len(sequence.generated)
    else:
        # The cache of a self-scheduling engine is only modelled here: it reports its hits later.
        cached = 0 if replica.spec.self_scheduling else sequence.cached_tokens
        replica.prompt_tokens += len(sequence.request.prompt)
        replica.hit_tokens += cached
        sequence.charged_tokens = len(sequence.request.prompt) - cached + sequence.expected_new_tokens
    queue.charge(sequence, sequence.charged_tokens)


def count_hits(sequence: ScheduledSequence, replica: ReplicaScheduler, queue: FairQueue) -> None:
    """Count the hits in the cache of a self-scheduling engine; the tenant pays less."""
    if sequence.resumed:  # counted where it ran before
        return
    found = sequence.engine_cached_tokens - sequence.counted_hits
    sequence.counted_hits += found
    replica.hit_tokens += found
    queue.charge(sequence, -found)
