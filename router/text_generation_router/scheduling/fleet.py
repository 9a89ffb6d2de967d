"""Fleet: which few of many replicas to look at for a sequence, so that dispatch does not grow with the fleet.

Replicas that likely cache a prefix of the sequence are remembered by digests of that prefix; for the load a sample is
compared. Both are hints: the replicas chosen are asked for what they really hold.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from text_generation_router.scheduling.keys import TOKEN_BYTES
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.sequence import ScheduledSequence

SMALL_FLEET = 8
"""Up to this number of replicas, all are compared and this module is not used."""
MAX_PREFIXES = 1 << 16
"""Prefixes whose last replicas are remembered."""
REPLICAS_PER_PREFIX = 4
SAMPLE_SIZE = 8
"""Replicas compared for their load: the best of eight is hardly busier than the best of all."""
LEAST_LOADED = 2
"""Replicas of the sample that are looked at closely: one of them may lack blocks."""


class PrefixHints:
    """The last replicas that got prompts with a given prefix.

    A prompt is remembered under its first 64, 128, 256 … tokens. A lookup finds the longest of these prefixes that a new
    prompt shares with an earlier one.
    """

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, list[int]] = OrderedDict()

    def remember(self, sequence: ScheduledSequence, replica: int) -> None:
        for digest in _prefix_digests(sequence):
            replicas = self._replicas.setdefault(digest, [])
            if replica in replicas:
                replicas.remove(replica)
            replicas.append(replica)
            del replicas[:-REPLICAS_PER_PREFIX]
            self._replicas.move_to_end(digest)
        while len(self._replicas) > MAX_PREFIXES:
            self._replicas.popitem(last=False)

    def replicas(self, sequence: ScheduledSequence) -> list[int]:
        """Return the replicas that likely cache a prefix of `sequence`, the best first."""
        found: dict[int, None] = {}
        for digest in _prefix_digests(sequence):  # longest first
            found.update(dict.fromkeys(reversed(self._replicas.get(digest, ()))))
            if len(found) >= REPLICAS_PER_PREFIX:
                break
        return list(found)


def least_loaded(
    sequence: ScheduledSequence,
    replicas: Mapping[int, ReplicaScheduler],
    fleet: Sequence[int],
    load: Callable[[ReplicaScheduler], tuple[int, ...]],
) -> list[ReplicaScheduler]:
    """Return the two of a sample of `replicas` with the smallest `load` that have the blocks for `sequence`.

    `fleet` has the numbers of all replicas, those without room, too. Each sequence has another sample.
    """
    size = len(fleet)
    start, stride = pseudo_random(sequence.arrival, size), max(1, size // SAMPLE_SIZE)
    numbers = (fleet[(start + stride * step) % size] for step in range(SAMPLE_SIZE))
    sample = [replicas[number] for number in numbers if number in replicas] or list(replicas.values())
    # The sequence holds up those behind it: if the sample is full, look for room everywhere.
    roomy = [replica for replica in sample if replica.has_blocks(sequence)]
    roomy = roomy or [replica for replica in replicas.values() if replica.has_blocks(sequence)] or sample
    return sorted(roomy, key=load)[:LEAST_LOADED]


def pseudo_random(number: int, below: int) -> int:
    """Return a number in [0, below) that is scattered, and the same for the same `number` (Fibonacci hashing)."""
    return number * 0x9E3779B97F4A7C15 % (1 << 64) * below >> 64


def _prefix_digests(sequence: ScheduledSequence) -> Sequence[bytes]:
    """Return digests of the first 64, 128, 256 … prompt tokens, the longest first. Computed once per sequence."""
    if sequence.prefix_digests is None:
        digests = []
        digest, start, end = blake2b(sequence.salt.encode(), digest_size=16), 0, 64 * TOKEN_BYTES
        while end <= len(sequence.prompt_key):
            digest.update(sequence.prompt_key[start:end])
            digests.append(digest.copy().digest())
            start, end = end, 2 * end
        sequence.prefix_digests = digests[::-1]
    return sequence.prefix_digests
