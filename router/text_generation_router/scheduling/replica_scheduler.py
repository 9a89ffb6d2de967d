"""ReplicaScheduler: the sequences of one replica, their slots and KV blocks, and what its next step computes.

    place(sequence)                 a queued sequence gets a slot and blocks
    schedule() -> SchedulerOutput   orders for the next step boundary
    update(output)                  the results of a step

One set of orders is under way at a time. Meanwhile the replica makes steps on its own; sequences stop at the end of their blocks.

KV blocks: see `kv_cache`; their copies: `copies`. Where none is left for a sequence without room, one is preempted: requeued with
its new tokens as part of its prompt. A slot and its blocks are reused only after a report showed that the release was applied.

A self-scheduling engine gets placements and releases only. Chunks and blocks are planned here all the same, as a model of it.
"""

from functools import partial
from itertools import accumulate, repeat

from text_generation_router.request import RequestId
from text_generation_router.scheduling.chunking import ChunkSizer, PendingPrompts
from text_generation_router.scheduling.copies import ReplicaCopies
from text_generation_router.scheduling.host_cache import HostCache
from text_generation_router.scheduling.kv_cache import KVCache
from text_generation_router.scheduling.messages import (
    Deliveries,
    Failed,
    Placement,
    ReplicaSpec,
    SchedulerOutput,
    StepOutput,
)
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.preemption import choose_victim, growth_margin
from text_generation_router.scheduling.running_adapters import RunningAdapters
from text_generation_router.scheduling.sequence import ScheduledSequence, State

STEPS_AHEAD = 2
"""Steps' worth of prompt tokens given ahead to a self-scheduling engine."""


class ReplicaScheduler:
    def __init__(self, replica: int, spec: ReplicaSpec, policy: Policy, host: HostCache | None = None) -> None:
        self.replica = replica
        self.spec = spec
        self.reuses_prefixes = policy.prefix_caching and not spec.keeps_states
        self.cache = KVCache(spec, host, prefix_caching=self.reuses_prefixes)
        self.copies = ReplicaCopies(self.cache)
        self.prompts = PendingPrompts(spec.block_size, policy.max_batch_prefill_tokens)
        self.adapters = RunningAdapters()
        self.is_lost = False
        self.work = 0
        """Expected tokens still to compute here."""
        self.promised_tokens = 0
        """Prompt and maximum new tokens of all sequences with a slot."""
        self.preemptions = self.prompt_tokens = self.hit_tokens = 0
        """Prompt tokens of the sequences that were placed here for the first time, and those found in the prefix cache."""
        self._policy = policy
        self._chunk_sizer = ChunkSizer(policy, spec.block_size)
        self._slots: list[ScheduledSequence | None] = [None] * (spec.ranks * spec.num_slots)
        """The slots of all ranks; those of others stay empty."""
        self._free_slots = list(reversed(spec.slots))
        self._placed: dict[RequestId, ScheduledSequence] = {}
        self._running: dict[RequestId, ScheduledSequence] = {}
        self._to_release: list[ScheduledSequence] = []
        self._releasing: list[ScheduledSequence] = []
        """Released by the last orders, which are not known to be applied."""
        self.orders_sent = self._orders_applied = 0
        """Numbers of the last orders."""
        self._steps_since_placement = 0

    def may_place(self, waiting: int) -> bool:
        """Return True if one of `waiting` queued sequences may be placed, apart from its prompt and blocks."""
        running, placed = len(self._running), len(self._placed)
        if not self._free_slots or running + placed >= self._policy.max_batch_size:
            return False
        steps = self._steps_since_placement
        return self._policy.may_place(waiting=waiting + placed, running=running, steps_since_placement=steps)

    @property
    def has_prefill_room(self) -> bool:
        """True if one more prompt could be started in the next steps."""
        budget = self._policy.max_batch_prefill_tokens
        if self.spec.self_scheduling:
            return self.prompts.uncomputed < STEPS_AHEAD * budget
        return self.prompts.unscheduled < budget

    def has_blocks(self, sequence: ScheduledSequence) -> bool:
        """Return True if it can hold `sequence`, with blocks now for all its known tokens, even if none is cached."""
        nothing, margins = self.cache.tree.find(sequence.salt, b""), self._margins(sequence)
        return self.can_hold(sequence) and self.cache.has_room(
            sequence, nothing, sequence.length, margins, self.prompts
        )

    def can_hold(self, sequence: ScheduledSequence) -> bool:
        """Return True if `sequence` could run here alone, to its last token."""
        return self.spec.fits(sequence.max_length, sequence.request.adapter)

    def _margins(self, sequence: ScheduledSequence) -> tuple[int, int]:
        """Return the blocks that a placement leaves in the first group, and in the others, whose sequences hardly grow."""
        others, answer = len(self._running) + len(self._placed), self.cache.blocks_for(sequence.expected_new_tokens)
        return growth_margin(others, answer, self.spec.num_blocks), others

    def place(self, sequence: ScheduledSequence) -> bool:
        """Give `sequence` a slot and the blocks of its known tokens. Return False if there are not enough blocks."""
        if not self.can_hold(sequence) or not self.adapters.take(sequence.request.adapter, self.spec):
            return False
        cache, tokens, margins = self.cache, sequence.length, self._margins(sequence)
        if self.spec.reserves_max_length:
            tokens, margins = sequence.max_length, (0, 0)
        prefix, loaded = self.copies.find(sequence)
        if not cache.has_room(sequence, prefix, tokens, margins, self.prompts):
            return False
        cache.lock_prefix(sequence, prefix, 0 if loaded is None else loaded.blocks)
        cached, grown = prefix.blocks, min(sequence.length + self._policy.growth_tokens, sequence.max_length)
        needed, wanted = cache.blocks_for(tokens) - cached, cache.blocks_for(grown) - cached
        cache.allocate(sequence, max(needed, wanted if wanted + margins[0] <= cache.available else 0))
        if cache.pools:
            sequence.capacity = sequence.cached_tokens + self.spec.block_size
        sequence.enter_replica(self.replica, self._free_slots.pop())
        if loaded is not None:
            self.copies.load(sequence, loaded)
        self._slots[sequence.slot] = sequence
        self._placed[sequence.id] = sequence
        self.prompts.add(sequence)
        self.adapters.started(sequence.request.adapter)
        self.work += sequence.remaining_work
        self.promised_tokens += sequence.max_length + 1
        return True

    @property
    def may_have_orders(self) -> bool:
        """False if `schedule` would return None. Cheap to read."""
        return bool(self.prompts.unscheduled or self._to_release or self.cache.urgent or self.copies.may_have_orders)

    def schedule(self, number: int | None = None) -> SchedulerOutput | None:
        if self.orders_sent > self._orders_applied or not self.may_have_orders:
            return None
        running, cache, growth = len(self._running), self.cache, self._policy.growth_tokens
        spare = running + self.prompts.blocks_kept if cache.pools and self.prompts.unscheduled else running
        allocations, stalled = cache.grow(growth, spare)
        stalled += cache.starved(self.prompts)
        if stalled and not self._awaits_blocks:
            self._preempt()
        budget = self.prompts.unscheduled
        if not self.spec.self_scheduling:
            budget = self._chunk_sizer.budget(len(self._running) - self.prompts.running, len(self.prompts))
        placements, prefill = [], []
        scarce = cache.may_limit_prompts(spare, budget, growth, len(self.prompts))
        reach = partial(cache.reach, running=running) if scarce else None
        for sequence, chunk in self.prompts.schedule(budget, reach):
            cache.chunk_scheduled(sequence, growth, spare if scarce else None, allocations)
            if sequence.state is State.PLACED:
                placements.append(self._start(sequence))
            prefill.append((sequence.slot, chunk))
        if self.spec.self_scheduling:
            allocations, prefill = [[]], []
        copies = self.copies.orders(2 * (running + len(self._placed)))
        if not (self._to_release or placements or any(allocations) or prefill or copies):
            return None
        self.orders_sent = number or self.orders_sent + 1
        self._releasing, self._to_release = self._to_release, []
        join_reason = None
        if placements:
            steps, self._steps_since_placement = self._steps_since_placement, 0
            join_reason = self._policy.join_reason(running=running, steps_since_placement=steps)
        return SchedulerOutput(
            number=self.orders_sent,
            release=tuple(sequence.slot for sequence in self._releasing),
            placements=tuple(placements),
            allocations=tuple(allocations[0]),
            further_allocations=tuple(map(tuple, allocations[1:])),
            prefill=tuple(prefill),
            join_reason=join_reason,
            copies=copies,
        )

    @property
    def _awaits_blocks(self) -> bool:
        placed = any(not sequence.loading for sequence in self._placed.values())
        return placed or self.copies.is_storing or any(sequence.blocks for sequence in self._to_release)

    def _preempt(self) -> None:
        if victim := choose_victim(self._running.values(), self_scheduling=self.spec.self_scheduling):
            self.preemptions += not victim.request.replayed
            self._release(victim, State.PREEMPTED)

    def _start(self, sequence: ScheduledSequence) -> Placement:
        del self._placed[sequence.id]
        sequence.state = State.RUNNING
        self._running[sequence.id] = sequence
        own = self.spec.self_scheduling
        return Placement(
            slot=sequence.slot,
            request=sequence.request,
            generated=tuple(sequence.generated),
            blocks=() if own else tuple(sequence.blocks),
            cached_tokens=0 if own else sequence.cached_tokens,
            own_cached_tokens=0 if own else sequence.own_cached_tokens,
            further_blocks=self.cache.further_blocks(sequence),
            rank=self.spec.rank if self.spec.ranks > 1 else None,
        )

    def drop(self, sequence: ScheduledSequence) -> None:
        """Cancel `sequence`, which is here. One that was never sent leaves at once; idempotent."""
        if sequence.state is State.RUNNING:
            self._release(sequence, State.CANCELLED)
        elif sequence.state is State.PLACED:
            self._leave(sequence)
            if not sequence.loading:  # else at the end of its load
                self._vacate(sequence, State.CANCELLED)
        sequence.state = State.CANCELLED

    def move(self, sequence: ScheduledSequence) -> None:
        """Preempt `sequence`: it goes on elsewhere once it is stored. One that was not sent waits at once."""
        if sequence.state is State.RUNNING:
            self._release(sequence, State.PREEMPTED)
            self.copies.moving.add(sequence)
        else:
            self._leave(sequence)
            self._vacate(sequence, State.WAITING)

    @property
    def sequences(self) -> list[ScheduledSequence]:
        """Its placed and running sequences."""
        return [*self._running.values(), *self._placed.values()]

    @property
    def is_empty(self) -> bool:
        """True if it has no sequences and nothing to store."""
        return not (self.occupied_slots or self.copies.is_storing or self.copies.may_have_orders)

    def close(self) -> list[ScheduledSequence]:
        """Return the sequences of this replica, which is lost, oldest first."""
        self.is_lost = True
        self.copies.close()
        return sorted((each for each in self._slots if each is not None), key=lambda sequence: sequence.arrival)

    def _release(self, sequence: ScheduledSequence, state: State) -> None:
        self._leave(sequence)
        sequence.state = state
        self._to_release.append(sequence)

    def _leave(self, sequence: ScheduledSequence) -> None:
        """Schedule nothing more for `sequence`. It keeps slot and blocks."""
        self._placed.pop(sequence.id, None)
        self._running.pop(sequence.id, None)
        self.cache.stop_growth(sequence)
        self.prompts.remove(sequence)
        self.work -= sequence.remaining_work

    def _end(self, sequence: ScheduledSequence, state: State) -> None:
        """Free slot and blocks of `sequence`, which ended or whose release was applied."""
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        elif sequence in self._to_release:
            self._to_release.remove(sequence)
        if state is not State.FAILED:  # what a failed step computed is not reused
            self.cache.commit(sequence, sequence.num_kv_tokens)
            self.copies.keep(sequence)
        self._vacate(sequence, state)

    def _vacate(self, sequence: ScheduledSequence, state: State) -> None:
        self.copies.moving.discard(sequence)
        self.cache.free(sequence)
        self.adapters.ended(sequence.request.adapter)
        self._slots[sequence.slot] = None
        self._free_slots.append(sequence.slot)
        self.promised_tokens -= sequence.max_length + 1
        sequence.leave_replica(state)

    def update(
        self, output: StepOutput, deliveries: Deliveries, *, measured: bool = True
    ) -> tuple[int, list[ScheduledSequence]]:
        """Record the results of a step, and add tokens and errors to `deliveries`; `measured`: its time counts.

        Return the prompt and new tokens computed for running sequences that did not fail, and the sequences that left:
        FINISHED, FAILED, CANCELLED, or WAITING after a preemption.
        """
        left: list[ScheduledSequence] = []
        served = 0
        if measured and output.step_s and self._policy.target_itl_s is not None:
            prefill_tokens = sum(chunk for _, chunk in output.prefilled)
            self._chunk_sizer.update(prefill_tokens, len(output.slots), output.step_s / output.steps, output.steps)
        for slot, tokens in output.cached:
            if (hit := self._slots[slot]) is not None and not hit.generated_when_placed:
                deliveries.cached.append((hit.id, hit.hit(tokens)))
        if output.prefilled or (self.prompts and self.spec.self_scheduling):
            served = self._update_prefills(output)
        served += self._update_tokens(output, deliveries, left)
        for slot, (kind, message) in output.failed.items():
            if sequence := self._slots[slot]:
                if sequence.state is not State.CANCELLED:
                    deliveries.failed.append(Failed(sequence.id, kind, message))
                self._end(sequence, State.FAILED)
                left.append(sequence)
        assert all(self._slots[slot] is None for slot in output.finished), "a sequence finishes with a token"
        for copy in output.copied:
            if (loaded := self.copies.ended(copy)) is not None:
                self._loaded(loaded, left)
        self._update_releases(output.orders_applied, left)
        self._steps_since_placement += output.steps if output.slots else 0
        return served, left

    def _loaded(self, sequence: ScheduledSequence, left: list[ScheduledSequence]) -> None:
        """Go on with a sequence whose load has ended; one whose load failed waits again."""
        if not sequence.loading:
            self.work -= sequence.cached_tokens - sequence.num_computed_tokens
            self.prompts.loaded(sequence)
            return
        if sequence.state is State.PLACED:
            self._leave(sequence)
            sequence.state = State.WAITING
        self._vacate(sequence, sequence.state)
        left.append(sequence)

    def _update_prefills(self, output: StepOutput) -> int:
        served = 0
        for slot, chunk in output.prefilled:
            if (sequence := self._slots[slot]) is not None and slot not in output.failed:
                served += self._prefilled(sequence, chunk)
        if self.spec.self_scheduling:
            # Such an engine has its own prefix cache, and need not report prefill before the first token.
            for slot in output.slots:
                if (sequence := self._slots[slot]) is not None and sequence in self.prompts:
                    served += self._prefilled(sequence, sequence.prefill_length - sequence.num_computed_tokens)
        return served

    def _prefilled(self, sequence: ScheduledSequence, chunk: int) -> int:
        chunk = min(chunk, sequence.num_scheduled_tokens - sequence.num_computed_tokens)
        if sequence in self.prompts:
            self.work -= chunk
            self.prompts.computed(sequence, chunk)
        else:  # its release is under way
            sequence.num_computed_tokens += chunk
        self.cache.commit(sequence, sequence.num_computed_tokens)
        self.cache.give_back(sequence)
        if sequence.num_computed_tokens == sequence.prefill_length:
            self.copies.keep(sequence)  # while it guards the blocks: other prompts may need them when it ends
        return chunk

    def _update_tokens(self, output: StepOutput, deliveries: Deliveries, left: list[ScheduledSequence]) -> int:
        # Runs once per token: local names, no properties, the rare cases below.
        slots, finished, token_ids = self._slots, output.finished, output.token_ids
        deliver = deliveries.tokens.append
        running, cancelled, low_room = State.RUNNING, State.CANCELLED, self.cache.low_room
        served = unexpected = 0
        counts = output.token_counts
        starts = output.token_starts or (accumulate(counts, initial=0) if counts else range(len(output.slots)))
        for slot, count, start in zip(output.slots, counts or repeat(1), starts, strict=False):
            sequence = slots[slot]
            if sequence is not None:
                end = start + count
                state = sequence.state
                reason = finished.get(slot) if finished else None
                if state is not cancelled:
                    if count == 1:
                        sequence.generated.append(token_ids[start])
                    else:
                        sequence.generated += token_ids[start:end]
                    sequence.length = length = sequence.length + count
                    deliver((sequence.id, start, end, reason))
                    if state is running:
                        served += count
                        # Tokens beyond the expected length were never counted as work.
                        if (beyond := length - sequence.expected_length) > 0:
                            unexpected += min(count, beyond)
                        # Once when it gets low, then with every token when it is urgent.
                        if (room := sequence.capacity - length) < low_room and (
                            room < self.cache.urgent_room or room + count >= low_room
                        ):
                            self.cache.check_room(sequence)
                if reason is not None:
                    self._end(sequence, state if state is cancelled else State.FINISHED)
                    left.append(sequence)
        self.work -= served - unexpected
        return served

    def _update_releases(self, orders_applied: int, left: list[ScheduledSequence]) -> None:
        """Free what the last orders released, once they were applied."""
        self._orders_applied = orders_applied
        if orders_applied < self.orders_sent:
            return
        released, self._releasing = self._releasing, []
        for sequence in released:
            if sequence.slot >= 0:  # else it ended before its release arrived
                self._end(sequence, State.WAITING if sequence.state is State.PREEMPTED else State.CANCELLED)
                left.append(sequence)

    def request_in(self, slot: int) -> RequestId | None:
        sequence = self._slots[slot]
        return sequence.id if sequence is not None and sequence.state is not State.CANCELLED else None

    @property
    def occupied_slots(self) -> int:
        """Slots in use, including those to be released."""
        return self.spec.num_slots - len(self._free_slots)

    @property
    def unsent_slots(self) -> set[int]:
        """Slots of sequences that were not sent yet: the replica knows nothing of them."""
        return {sequence.slot for sequence in (*self._placed.values(), *self.copies.loading)}
