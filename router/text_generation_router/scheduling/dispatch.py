"""Dispatch: which replica a request should go to. It goes to the best one that has room for it now.

    score = tokens of its prompt that are cached there, or being computed  -  tokens of work that are before it there

Both sides are work: what a hit saves, and what a busy replica costs. So a request follows its prefix until the queue
there outweighs the hit; the next one then goes elsewhere and leaves its prefix there, too. One that hits nothing goes to
the least loaded replica. With equal scores it goes to the replica that was chosen longest ago. Where the best one has no
room only because of the prompts before it, the request waits for it: that is work the score has counted already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from text_generation_router.scheduling.batch import Batch
from text_generation_router.scheduling.entry import TOKEN_BYTES, Entry
from text_generation_router.scheduling.policy import Dispatch
from text_generation_router.scheduling.prefix import WORTH_WAITING_FOR

LOOKED_AT_ALL = 8
"""So many replicas are each asked for their cached prefix; of more, only those are that likely have one."""
HINTS = 1 << 16
"""Prefixes whose last replicas are remembered."""
REPLICAS_A_HINT = 4
SAMPLE = 8
"""Of more replicas, only so many are compared for their load: the best of eight is hardly busier than the best."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Replicas in the order in which they suit an entry."""

    roomy: list[Batch]
    """Those that may take it now, the best first."""
    worth_waiting_for: Batch | None = None
    """One that suits it better, and will have room in a few steps."""


class Dispatcher:
    """Ranks replicas for entries."""

    def __init__(self, how: Dispatch, replicas: int) -> None:
        self._how = how
        self._hints = PrefixHints() if how is Dispatch.PREFIX and replicas > LOOKED_AT_ALL else None
        self._chosen_at = [0] * replicas
        self._choices = 0

    def rank(self, entry: Entry, roomy: Mapping[int, Batch], crowded: Mapping[int, Batch]) -> Ranking:
        """The replicas, by number, in the order in which they suit `entry`; of many, the few best.

        `roomy` have room for it now, `crowded` lack it only for the prompts that are before it there.
        """
        if self._how is Dispatch.PREFIX:
            return self._by_prefix(entry, roomy, crowded)
        batches = list(roomy.values())
        if self._how is Dispatch.LEAST_LOADED:
            batches.sort(key=self._load)
        elif self._how is Dispatch.ROUND_ROBIN:
            batches.sort(key=lambda batch: self._chosen_at[batch.replica])
        else:
            first = _scrambled(entry.arrival, len(batches)) if batches else 0
            batches = [*batches[first:], *batches[:first]]
        return Ranking(batches)

    def cached_tokens(self, entry: Entry, batches: Sequence[Batch | None]) -> int:
        """The longest prefix of `entry` that one of `batches` has, as far as that is quickly known.

        batches[i] is replica i; None: it is lost.
        """
        replicas = range(len(batches)) if self._hints is None else self._hints.replicas(entry)[:1]
        asked = (batches[replica] for replica in replicas)
        return max((batch.cache.cached_tokens(entry) for batch in asked if batch is not None), default=0)

    def chosen(self, entry: Entry, batch: Batch) -> None:
        """`entry` goes to `batch`."""
        self._choices += 1
        self._chosen_at[batch.replica] = self._choices
        if self._hints is not None:
            self._hints.remember(entry, batch.replica)

    def _by_prefix(self, entry: Entry, roomy: Mapping[int, Batch], crowded: Mapping[int, Batch]) -> Ranking:
        if self._hints is not None:
            hinted = self._hints.replicas(entry)
            roomy = self._near(entry, roomy, hinted)
            crowded = {replica: crowded[replica] for replica in hinted if replica in crowded}
        scores = {replica: self._score(entry, batch) for replica, batch in roomy.items()}
        ranked = sorted(
            roomy.values(), key=lambda batch: (-scores[batch.replica], batch.held, self._chosen_at[batch.replica])
        )
        if not ranked or not crowded:
            return Ranking(ranked)
        score, replica = max((self._score(entry, batch), replica) for replica, batch in crowded.items())
        worth_it = score - scores[ranked[0].replica] >= WORTH_WAITING_FOR
        return Ranking(ranked, crowded[replica] if worth_it else None)

    def _score(self, entry: Entry, batch: Batch) -> int:
        return max(batch.cache.cached_tokens(entry), batch.being_computed(entry)[0]) - batch.work

    def _near(self, entry: Entry, batches: Mapping[int, Batch], hinted: Sequence[int]) -> dict[int, Batch]:
        """Those that likely have a prefix of `entry`, and two that have little to do: one may lack the blocks."""
        near = {replica: batches[replica] for replica in hinted if replica in batches}
        some = [batch for batch in self._some(entry, batches) if batch.has_blocks(entry)]
        # The entry holds up those behind it: it must not wait for a few that are full while others have room.
        some = some or [batch for batch in batches.values() if batch.has_blocks(entry)] or self._some(entry, batches)
        for batch in sorted(some, key=self._load)[:2]:
            near[batch.replica] = batch
        return near

    def _some(self, entry: Entry, batches: Mapping[int, Batch]) -> list[Batch]:
        """A few of many, others for each entry."""
        replicas = len(self._chosen_at)
        first, stride = _scrambled(entry.arrival, replicas), max(1, replicas // SAMPLE)
        looked_at = ((first + number * stride) % replicas for number in range(SAMPLE))
        return [batches[replica] for replica in looked_at if replica in batches] or list(batches.values())

    def _load(self, batch: Batch) -> tuple[int, int, int]:
        return batch.work, batch.held, self._chosen_at[batch.replica]


class PrefixHints:
    """Which replicas were given prompts that begin alike: a guess, to be checked there.

    A prompt is remembered under its beginnings of 64, 128, 256 … tokens, so that what is looked up is the longest of
    these that it shares with an earlier one.
    """

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, list[int]] = OrderedDict()

    def remember(self, entry: Entry, replica: int) -> None:
        """`entry` goes to `replica`."""
        for beginning in _beginnings(entry):
            known = self._replicas.setdefault(beginning, [])
            if replica in known:
                known.remove(replica)
            known.append(replica)
            del known[:-REPLICAS_A_HINT]
            self._replicas.move_to_end(beginning)
        while len(self._replicas) > HINTS:
            self._replicas.popitem(last=False)

    def replicas(self, entry: Entry) -> list[int]:
        """Replicas worth asking, the likeliest first."""
        worth: dict[int, None] = {}
        for beginning in _beginnings(entry):  # longest first
            worth.update(dict.fromkeys(reversed(self._replicas.get(beginning, ()))))
            if len(worth) >= REPLICAS_A_HINT:
                break
        return list(worth)


def _scrambled(number: int, below: int) -> int:
    """A number in [0, below): random enough, and the same every time (Fibonacci hashing)."""
    return number * 0x9E3779B97F4A7C15 % (1 << 64) * below >> 64


def _beginnings(entry: Entry) -> Sequence[bytes]:
    """Digests of its prompt's first 64, 128, 256 … tokens, the longest first; made once."""
    if entry.beginnings is None:
        digests = []
        digest, start, end = blake2b(entry.salt.encode(), digest_size=16), 0, 64 * TOKEN_BYTES
        while end <= len(entry.prompt_key):
            digest.update(entry.prompt_key[start:end])
            digests.append(digest.copy().digest())
            start, end = end, 2 * end
        entry.beginnings = digests[::-1]
    return entry.beginnings
