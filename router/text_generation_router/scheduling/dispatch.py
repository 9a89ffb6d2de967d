"""Dispatch: the replica for a queued sequence. It goes to the best one that has room now.

    score = prompt tokens cached there, or being computed  -  tokens of work pending there

Both are work: a hit saves it, a busy replica costs it. So a sequence follows its prefix until the pending work outweighs
the hit; the next one goes elsewhere and leaves its prefix there, too. A sequence without a hit goes to the least loaded
replica. Ties go to the replica chosen longest ago.

A sequence is skipped, and those behind it go first, if the best replica lacks room only because of prompts it has yet to
compute (the score counts that work already), if another sequence is computing its prefix there, or if no replica with room
holds its LoRA adapter or has a place for it (`running_adapters`). A suspect, which lost two replicas in a row without a new token,
waits until no replica is computing the prompt of another one: if it loses a third one, no other suspect does.
"""

import sys
from bisect import insort
from collections.abc import Iterator, Mapping, Set

from text_generation_router.scheduling.chunking import MIN_SHARED_TOKENS
from text_generation_router.scheduling.fleet import SMALL_FLEET, PrefixHints, least_loaded, pseudo_random
from text_generation_router.scheduling.lazy_heap import Key
from text_generation_router.scheduling.policy import Dispatch, Policy
from text_generation_router.scheduling.queue import FairQueue
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.roles import Roles
from text_generation_router.scheduling.sequence import ScheduledSequence

Reason = tuple[ReplicaScheduler, ScheduledSequence | None, int]
"""The reason to skip a sequence: (replica, leader, n) waits until `leader` has computed n tokens on `replica`; without a
leader, until `replica` has prefill room; if that is the sequence itself, until it is stored on the host."""


MAX_SKIPPED = 16
"""Sequences that one dispatch skips: it has to take microseconds."""


def _still_holds(reason: Reason) -> bool:
    """Return True if a sequence skipped for this reason has to wait on."""
    replica, leader, tokens = reason
    if replica.is_lost:
        return False
    if leader is None:
        return not replica.has_prefill_room
    if (host := replica.cache.host) is not None and leader in host.moving:
        return True
    return leader in replica.prompts and leader.num_computed_tokens < tokens


class Dispatcher:
    """Places queued sequences on replicas that have room.

    `queue`, `replicas` (by number, None for one that does not serve) and `draining` are the scheduler's.
    """

    def __init__(
        self, policy: Policy, queue: FairQueue, replicas: Mapping[int, ReplicaScheduler | None], draining: Set[int]
    ) -> None:
        self._policy, self._queue, self._replicas, self._draining = policy, queue, replicas, draining
        self.roles = Roles(policy, replicas, draining)
        self._numbers: list[int] = []
        """The numbers of all replicas: a sample takes any of them."""
        self._changed: set[int] = set()
        self._roomy: dict[int, ReplicaScheduler] = {}
        """Replicas that may get a sequence."""
        self._crowded: dict[int, ReplicaScheduler] = {}
        """Replicas that may not, but only because of prompts they have yet to compute."""
        self._hints: PrefixHints | None = None
        """None in a small fleet."""
        self._skipped: dict[Reason, list[ScheduledSequence]] = {}
        self._without_adapter: dict[str, list[ScheduledSequence]] = {}
        """Sequences that were skipped because no replica with room takes their adapter, by adapter, the most urgent first."""
        self._chosen_at: dict[int, int] = {}
        self._choices = 0

    def added(self, replica: int) -> None:
        self._numbers.append(replica)
        self._chosen_at[replica] = 0
        self._resize()

    def removed(self, replica: int) -> None:
        """Forget a replica that does not serve."""
        self._numbers.remove(replica)
        del self._chosen_at[replica]
        self._changed.discard(replica)
        self._roomy.pop(replica, None)
        self._crowded.pop(replica, None)
        self._resize()

    def _resize(self) -> None:
        large = self._policy.dispatch is Dispatch.PREFIX and len(self._numbers) > SMALL_FLEET
        self._hints = (self._hints or PrefixHints()) if large else None

    def changed(self, replica: int) -> None:
        """Look again whether `replica` has room."""
        self._changed.add(replica)

    def has_room(self, waiting: int) -> bool:
        """Return True if a replica may get one of `waiting` sequences, if it has the blocks."""
        # Under a waiting-served ratio the answer also depends on the length of the queue.
        for number in self._numbers if self._policy.waiting_served_ratio else self._changed:
            self._roomy.pop(number, None)
            self._crowded.pop(number, None)
            replica = self._replicas[number]
            if replica is not None and number not in self._draining and replica.may_place(waiting):
                (self._roomy if replica.has_prefill_room else self._crowded)[number] = replica
        self._changed.clear()
        return bool(self._roomy)

    def can_hold(self, sequence: ScheduledSequence) -> bool:
        """Return True if a replica that serves and does not drain could run `sequence` if it had room."""
        return any(
            replica is not None and number not in self._draining and replica.can_hold(sequence)
            for number, replica in self._replicas.items()
        )

    def place(self) -> Iterator[tuple[ScheduledSequence, ReplicaScheduler]]:
        """Place sequences on replicas with room. Yield each with its replica; the caller takes it out of the queue."""
        for over in [reason for reason in self._skipped if not _still_holds(reason)]:
            self._queue.unskip(self._skipped.pop(over))
        if self._without_adapter and self.has_room(len(self._queue)):
            self._unskip_takers()
        skipped = 0
        while skipped < MAX_SKIPPED and (sequence := self._queue.peek()) is not None:
            if not self.has_room(len(self._queue)):
                break
            ranked, reason = self._rank_with_reason(sequence)
            if reason is not None:
                self._queue.skip(sequence)
                self._skipped.setdefault(reason, []).append(sequence)
                skipped += 1
            elif not ranked and self.can_hold(sequence):
                self._queue.skip(sequence)
                insort(self._without_adapter.setdefault(sequence.request.adapter, []), sequence, key=_urgency)
            elif replica := next((each for each in ranked if each.place(sequence)), None):
                self._placed(sequence, replica.replica)
                yield sequence, replica
            elif self.can_hold(sequence):
                break
            else:
                self._queue.skip(sequence)  # until a replica joins or stops to drain

    def _unskip_takers(self) -> None:
        """Look again at sequences whose adapter had no place, and forget those that were cancelled."""
        for adapter, sequences in list(self._without_adapter.items()):
            self._without_adapter[adapter] = [each for each in sequences if each.skipped]
            if not self._without_adapter[adapter]:  # all were cancelled
                del self._without_adapter[adapter]
                for replica in filter(None, self._replicas.values()):
                    replica.adapters.waits_no_more(adapter)
                continue
            if not _takers(self._roomy, adapter):
                self._empty_place(adapter)
                continue
            waiting = self._without_adapter.pop(adapter)
            self._queue.unskip(waiting[:MAX_SKIPPED])
            if later := waiting[MAX_SKIPPED:]:
                self._without_adapter[adapter] = later

    def _empty_place(self, adapter: str) -> None:
        """Let a place become free for an adapter on one of the replicas that hold it and have room."""
        holders = [each for each in self._roomy.values() if each.spec.holds(adapter)]
        if holders and not any(each.adapters.has_part_in(adapter) for each in holders):
            min(holders, key=self._load).adapters.empty_place(adapter)

    def unskip_all(self) -> None:
        """Look at all sequences again: a replica drains, or stops to, or holds other adapters."""
        self._skipped.clear()
        self._without_adapter.clear()
        self._queue.unskip(self._queue)

    def _rank_with_reason(self, sequence: ScheduledSequence) -> tuple[list[ReplicaScheduler], Reason | None]:
        """Return the replicas with room, the best for `sequence` first, and the reason to skip it, if there is one.

        Of many replicas only a few are ranked: see `fleet`.
        """
        ranked, better = self._rank(sequence)
        if self._policy.prefill_replicas:  # those of the other role come last
            prefill, is_prefill = self.roles.needs_prefill(sequence), self.roles.is_prefill
            ranked.sort(key=lambda each: is_prefill(each) != prefill)
            better = better if better is not None and is_prefill(better) == prefill else None
        if better is not None:
            return ranked, (better, None, 0)
        if ranked and (host := ranked[0].cache.host) is not None and sequence in host.moving:
            return ranked, (ranked[0], sequence, 0)
        if ranked and sequence.moves.is_suspect:
            first = self._computes_suspect(ranked[0])
            ranked = [replica for replica in ranked if self._computes_suspect(replica) is None]
            if not ranked and first is not None:
                return ranked, (first, first.prompts.suspect, sys.maxsize)
        if ranked and ranked[0].reuses_prefixes and not sequence.request.logprobs.prompt:
            cache, (tokens, leader) = ranked[0].cache, ranked[0].prompts.longest_shared(sequence)
            lacking = tokens - cache.tokens_on_device(sequence) if leader is not None else 0
            if leader is not None and lacking >= MIN_SHARED_TOKENS and cache.will_share(leader, tokens):
                return ranked, (ranked[0], leader, tokens)
        return ranked, None

    def _computes_suspect(self, replica: ReplicaScheduler) -> ReplicaScheduler | None:
        """Return a replica that would be lost with this one, or itself, that computes the prompt of a suspect; None without one."""
        together = [replica]
        if replica.spec.ranks > 1:
            others = (each for each in self._replicas.values() if each is not None and each.spec.ranks > 1)
            together = [each for each in others if each.spec.shard == replica.spec.shard]
        return next((each for each in together if each.prompts.suspect is not None), None)

    def _rank(self, sequence: ScheduledSequence) -> tuple[list[ReplicaScheduler], ReplicaScheduler | None]:
        """Return the replicas with room, the best first, and a crowded one that is much better than these."""
        how, roomy = self._policy.dispatch, _takers(self._roomy, sequence.request.adapter)
        if how is Dispatch.PREFIX:
            return self._rank_by_prefix(sequence, roomy)
        replicas = list(roomy.values())
        if how is Dispatch.LEAST_LOADED:
            replicas.sort(key=self._load)
        elif how is Dispatch.ROUND_ROBIN:
            replicas.sort(key=lambda replica: self._chosen_at[replica.replica])
        elif replicas:
            start = pseudo_random(sequence.arrival, len(replicas))
            replicas = [*replicas[start:], *replicas[:start]]
        return replicas, None

    def _placed(self, sequence: ScheduledSequence, replica: int) -> None:
        self._choices += 1
        self._chosen_at[replica] = self._choices
        self._changed.add(replica)
        if self._hints is not None:
            self._hints.remember(sequence, replica)

    def cached_tokens(self, sequence: ScheduledSequence) -> int:
        """Return the longest cached prefix of `sequence` on a replica; of many, only the likeliest one is asked."""
        numbers = self._numbers if self._hints is None else self._hints.replicas(sequence)[:1]
        replicas = (self._replicas.get(number) for number in numbers)
        return max((replica.cache.cached_tokens(sequence) for replica in replicas if replica is not None), default=0)

    def _rank_by_prefix(
        self, sequence: ScheduledSequence, roomy: Mapping[int, ReplicaScheduler]
    ) -> tuple[list[ReplicaScheduler], ReplicaScheduler | None]:
        crowded = _takers(self._crowded, sequence.request.adapter)
        if self._hints is not None:
            hinted = self._hints.replicas(sequence)
            crowded = {number: crowded[number] for number in hinted if number in crowded}
            near = {number: roomy[number] for number in hinted if number in roomy}
            near.update((each.replica, each) for each in least_loaded(sequence, roomy, self._numbers, self._load))
            roomy = near
        if len(roomy) == 1 and not crowded:
            return list(roomy.values()), None
        scores = {number: _score(sequence, replica) for number, replica in roomy.items()}
        ranked = sorted(
            roomy.values(), key=lambda each: (-scores[each.replica], each.occupied_slots, self._chosen_at[each.replica])
        )
        if not ranked or not crowded:
            return ranked, None
        score, number = max((_score(sequence, replica), number) for number, replica in crowded.items())
        much_better = score - scores[ranked[0].replica] >= MIN_SHARED_TOKENS
        return ranked, crowded[number] if much_better else None

    def _load(self, replica: ReplicaScheduler) -> tuple[int, int, int]:
        return replica.work, replica.occupied_slots, self._chosen_at[replica.replica]


def _takers(replicas: Mapping[int, ReplicaScheduler], adapter: str) -> Mapping[int, ReplicaScheduler]:
    """Return those of `replicas` on which a sequence with a LoRA adapter may start; all for ""."""
    if not adapter:
        return replicas
    return {number: replica for number, replica in replicas.items() if replica.adapters.take(adapter, replica.spec)}


def _urgency(sequence: ScheduledSequence) -> tuple[bool, Key]:
    return not sequence.requeued, sequence.queue_key


def _score(sequence: ScheduledSequence, replica: ReplicaScheduler) -> int:
    pending = replica.prompts.longest_shared(sequence)[0] if replica.reuses_prefixes else 0
    return max(replica.cache.cached_tokens(sequence), pending) - replica.work
