"""Batch: the entries that one replica holds, their slots and KV blocks, and what its next step is to compute.

    place(entry)          a queued entry gets a slot and blocks here
    decide() -> Orders    what is to change at the replica's next step boundary
    apply(outcome)        what a step brought

One set of orders is on its way at a time. The replica free-runs meanwhile, and every sequence stops by itself at the end
of its grant, so nothing here has to keep pace with the steps.

KV blocks. An entry is granted what its prompt needs and a little growth. When its room shrinks below LOW_ROOM it wants
more; the wish rides on the next orders, and makes orders of its own only below URGENT_ROOM, so that a step boundary
stays free for a newcomer's prefill. When neither free nor unused cached blocks are left, the newest entry of the lowest
class is preempted: released, and put back at the head of the queue with what it generated as part of its prompt. The
oldest entry is never preempted for another's sake, and a request that could not finish alone is not accepted, so
something always gets on.

A slot and its blocks have their next owner only after a report showed that the release was applied.

A replica whose engine schedules for itself gets admissions and releases alone: chunks and blocks are planned here just
the same, as a picture of what the engine does, so that no more is handed over than it can hold.
"""

from __future__ import annotations

from itertools import repeat

from text_generation_router.request import RequestId
from text_generation_router.scheduling.applied import Applied
from text_generation_router.scheduling.blocks import BlockCache
from text_generation_router.scheduling.entry import Entry, State
from text_generation_router.scheduling.growth import LOW_ROOM, URGENT_ROOM, Growth, to_preempt
from text_generation_router.scheduling.latency import PrefillBudget
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.prompts import Prompts
from text_generation_router.scheduling.step_cost import StepShape
from text_generation_router.scheduling.steps import Admission, Deliveries, Failed, Orders, Outcome, ReplicaSpec

BUDGETS_AHEAD = 2
"""Steps' worth of prompt tokens that an engine which schedules for itself is given ahead."""


class Batch:
    """What one replica holds."""

    def __init__(self, replica: int, spec: ReplicaSpec, policy: Policy) -> None:
        self.replica = replica
        self.spec = spec
        self._policy = policy
        self.cache = BlockCache(spec.num_blocks, spec.block_size, prefix_caching=policy.prefix_caching)
        self._budget = PrefillBudget(policy, spec.block_size)
        self._slots: list[Entry | None] = [None] * spec.num_slots
        self._free_slots = list(range(spec.num_slots - 1, -1, -1))
        self._placed: dict[RequestId, Entry] = {}
        self._running: dict[RequestId, Entry] = {}
        self._prompts = Prompts(spec.block_size)
        self._growth = Growth(self.cache, policy.growth_tokens)
        self._to_release: list[Entry] = []
        self._releasing: list[Entry] = []
        self._number = 0
        self._applied = 0
        self._steps_since_admission = 0
        self._context = 0
        """Tokens of the entries that decode."""
        self.work = 0
        """Tokens that the entries here will probably still cost."""
        self.preemptions = 0
        self.is_lost = False

    # ------------------------------------------------------------------------------------------------------ newcomers

    @property
    def has_prefill_room(self) -> bool:
        """Whether one more prompt would have its turn in the next steps."""
        most = self._policy.max_batch_prefill_tokens
        if self.spec.self_scheduling:
            return self._prompts.uncomputed < BUDGETS_AHEAD * most
        return self._prompts.unordered < most

    def has_seat(self, waiting: int) -> bool:
        """Whether one more of `waiting` entries may run here now, prompts aside."""
        if not self._free_slots or len(self._running) + len(self._placed) >= self._policy.max_batch_size:
            return False
        return self._policy.may_admit(
            waiting=waiting + len(self._placed),
            running=len(self._running),
            steps_since_admission=self._steps_since_admission,
        )

    def has_blocks(self, entry: Entry) -> bool:
        """Whether the prompt of `entry` would find its blocks now, were none of it cached."""
        margin = len(self._running) + len(self._placed)
        return self.cache.pool.blocks_for(entry.length) + margin <= self.cache.available

    def can_hold(self, entry: Entry) -> bool:
        """Whether `entry` could run here alone, to its last token."""
        return entry.longest <= self.spec.num_blocks * self.spec.block_size

    def being_computed(self, entry: Entry) -> tuple[int, Entry | None]:
        """Leading tokens of `entry` that another one here is computing or has computed, and who that is."""
        return self._prompts.shared_with(entry)

    def place(self, entry: Entry) -> bool:
        """Give `entry` a slot and the blocks of its prompt; False if there are not enough."""
        if not self.can_hold(entry):
            return False
        cache, pool = self.cache, self.cache.pool
        cache.lock_prefix(entry)
        have = len(entry.blocks)
        needed = pool.blocks_for(entry.length) - have
        # Whoever runs will grow: an admission that took the last blocks would be preempted at once.
        margin = len(self._running) + len(self._placed)
        if self._policy.reserve_worst_case or self.spec.reserves_longest:
            needed, margin = pool.blocks_for(entry.longest) - have, 0
        if needed + margin > cache.available:
            cache.free(entry)
            entry.leave_replica()
            return False
        wanted = pool.blocks_for(min(entry.length + self._policy.growth_tokens, entry.longest)) - have
        cache.grow(entry, max(needed, wanted if wanted + margin <= cache.available else 0))
        entry.capacity = len(entry.blocks) * pool.block_size
        entry.state = State.PLACED
        entry.generated_before = len(entry.generated)
        entry.replica = self.replica
        entry.slot = self._free_slots.pop()
        entry.prefill_length = entry.length
        entry.ordered = entry.prefilled = entry.cached_tokens
        self._slots[entry.slot] = entry
        self._placed[entry.request.id] = entry
        self._prompts.add(entry)
        self.work += entry.work_left
        return True

    # ------------------------------------------------------------------------------------------------------ decisions

    def decide(self) -> Orders | None:
        """What is to change at the next step boundary; None while orders are on their way, or nothing is to change."""
        if self._number > self._applied:
            return None
        grants = self._growth.grant(len(self._running), self._on_stalled)
        running, steps = len(self._running), self._steps_since_admission
        admit, prefill = self._order_prompts()
        released = self._to_release
        self_scheduling = self.spec.self_scheduling
        if not (released or admit or (not self_scheduling and (grants or prefill))):
            return None
        self._number += 1
        for entry in released:
            entry.released_by = self._number
        self._releasing += released
        self._to_release = []
        if admit:
            self._steps_since_admission = 0
        newcomers_join = bool(admit) and running > 0
        joined = self._policy.join_reason(running=running, steps_since_admission=steps) if newcomers_join else None
        return Orders(
            number=self._number,
            release=tuple(entry.slot for entry in released),
            admit=tuple(admit),
            grants=() if self_scheduling else tuple(grants),
            prefill=() if self_scheduling else tuple(prefill),
            joined=joined,
        )

    @property
    def wants_orders(self) -> bool:
        """Whether `decide` may have something to say. False is certain, and costs nothing to find out."""
        return bool(self._prompts.unordered or self._to_release or self._growth.urgent)

    def _order_prompts(self) -> tuple[list[Admission], list[tuple[int, int]]]:
        if (first := self._prompts.first_to_order) is None:
            return [], []
        budget = self._prompts.unordered
        if not self.spec.self_scheduling:
            decoding = len(self._running) - self._prompts.running
            budget = self._budget.tokens(decoding, self._context, first.ordered)
        admitted: list[Admission] = []
        chunks: list[tuple[int, int]] = []
        for entry, chunk in self._prompts.order(budget):
            if entry.state is State.PLACED:
                admitted.append(self._admit(entry))
            chunks.append((entry.slot, chunk))
        return admitted, chunks

    def _admit(self, entry: Entry) -> Admission:
        del self._placed[entry.request.id]
        entry.state = State.RUNNING
        self._running[entry.request.id] = entry
        self._growth.look_at(entry)
        blocks = () if self.spec.self_scheduling else tuple(entry.blocks)
        cached = 0 if self.spec.self_scheduling else entry.cached_tokens
        return Admission(entry.slot, entry.request, tuple(entry.generated), blocks, cached)

    def _blocks_are_coming(self) -> bool:
        """Releases under way that will fill the pool without another preemption."""
        return any(entry.blocks for entry in (*self._to_release, *self._releasing))

    def _on_stalled(self) -> None:
        """Somebody cannot go on for want of a block. If none is coming, preempt."""
        if self._placed or self._blocks_are_coming():
            return
        if entry := to_preempt(self._running.values(), self_scheduling=self.spec.self_scheduling):
            self.preemptions += 1
            self._release(entry, State.PREEMPTED)

    # -------------------------------------------------------------------------------------------------------- endings

    def drop(self, entry: Entry) -> None:
        """Nobody waits for `entry`, which is here, any more. Idempotent."""
        if entry.state is State.PLACED:
            self._unplace(entry)
        elif entry.state is State.RUNNING:
            self._release(entry, State.CANCELLED)
        else:
            entry.state = State.CANCELLED

    def clear(self) -> tuple[list[Entry], list[Entry]]:
        """The replica is gone, with all that it held. The entries that ran here, and those it had not started or was
        giving back; cancelled ones are in neither."""
        self.is_lost = True
        held = [entry for entry in self._slots if entry is not None and entry.state is not State.CANCELLED]
        held.sort(key=lambda entry: entry.arrival)
        ran = [entry for entry in held if entry.state is State.RUNNING]
        others = [entry for entry in held if entry.state is not State.RUNNING]
        for entry in held:
            entry.leave_replica()
        return ran, others

    def _unplace(self, entry: Entry) -> None:
        """Take back what `entry` was given, of which the replica knows nothing."""
        del self._placed[entry.request.id]
        self._leave(entry)
        self._vacate(entry)

    def _release(self, entry: Entry, state: State) -> None:
        self._leave(entry)
        entry.state = state
        self._to_release.append(entry)

    def _leave(self, entry: Entry) -> None:
        """`entry` goes no further here; it may still hold its slot and blocks."""
        self._running.pop(entry.request.id, None)
        self._growth.forget(entry)
        if not self._prompts.remove(entry):
            self._context -= entry.length
        self.work -= entry.work_left

    def _end(self, entry: Entry, *, sound: bool = True) -> None:
        """The replica holds `entry` no more. Unless it is `sound`, nobody is to use what it computed last."""
        if entry.state is State.RUNNING:
            self._leave(entry)
        if entry.released_by == 0 and entry in self._to_release:
            self._to_release.remove(entry)
        if sound:
            computed = entry.computed
            if self._policy.publish_prompts_only:
                computed = min(computed, len(entry.request.prompt))
            self.cache.publish(entry, computed)
        self._vacate(entry)

    def _vacate(self, entry: Entry) -> None:
        self.cache.free(entry)
        self._slots[entry.slot] = None
        self._free_slots.append(entry.slot)
        entry.leave_replica()

    # -------------------------------------------------------------------------------------------------------- outcomes

    def apply(self, outcome: Outcome, deliveries: Deliveries) -> Applied:
        """Record what a step brought; `deliveries` gets who is to hear of it."""
        applied = Applied()
        if outcome.step_s and self._budget.learns:
            self._learn(outcome)
        if outcome.prefilled or (self._prompts and self.spec.self_scheduling):
            applied.served = self._record_prefills(outcome)
        applied.served += self._record_tokens(outcome, deliveries, applied)
        for slot, (kind, message) in outcome.failed.items():
            if entry := self._slots[slot]:
                if entry.state is not State.CANCELLED:
                    deliveries.failed.append(Failed(entry.request.id, kind, message))
                self._end(entry, sound=False)
                applied.dropped.append(entry)
        for slot in outcome.finished:
            assert self._slots[slot] is None, "a sequence finishes with a token"
        self._acknowledge(outcome.orders_applied, applied)
        if outcome.slots:
            self._steps_since_admission += outcome.steps
        return applied

    def _learn(self, outcome: Outcome) -> None:
        tokens = pairs = completed = 0
        for slot, chunk in outcome.prefilled:
            if entry := self._slots[slot]:
                tokens += chunk
                pairs += int(chunk * (entry.prefilled + chunk / 2))
                completed += entry.prefilled + chunk == entry.prefill_length and slot not in outcome.failed
        rows = len(outcome.slots) - completed
        if tokens or rows:
            self._budget.learn(StepShape(tokens, rows, self._context, pairs), outcome.step_s / outcome.steps)

    def _record_prefills(self, outcome: Outcome) -> int:
        """Prompt tokens that were computed, of entries that go on."""
        served = 0
        for slot, chunk in outcome.prefilled:
            entry = self._slots[slot]
            if entry is not None and slot not in outcome.failed:
                served += self._prefilled(entry, chunk)
        if self.spec.self_scheduling:
            # Such an engine has a cache of its own, and need not say how it came to the first token.
            for slot in outcome.slots:
                entry = self._slots[slot]
                if entry is not None and entry in self._prompts:
                    served += self._prefilled(entry, entry.prefill_length - entry.prefilled)
        return served

    def _prefilled(self, entry: Entry, chunk: int) -> int:
        chunk = min(chunk, entry.prefill_length - entry.prefilled)
        if entry in self._prompts:
            self.work -= chunk
            if self._prompts.computed(entry, chunk):
                self._context += entry.length
        else:  # its release is under way
            entry.prefilled += chunk
        if not self._policy.publish_prompts_only:
            self.cache.publish(entry, entry.prefilled)
        return chunk

    def _record_tokens(self, outcome: Outcome, deliveries: Deliveries, applied: Applied) -> int:
        # Runs once a token: plain locals, no properties.
        slots, finished, token_ids = self._slots, outcome.finished, outcome.token_ids
        deliver = deliveries.tokens.append
        running, cancelled = State.RUNNING, State.CANCELLED
        first = advanced = unforeseen = 0
        for slot, count in zip(outcome.slots, outcome.token_counts or repeat(1), strict=False):
            end = first + count
            entry = slots[slot]
            if entry is not None:
                reason = finished.get(slot) if finished else None
                state = entry.state
                if state is not cancelled:
                    if count == 1:
                        entry.generated.append(token_ids[first])
                    else:
                        entry.generated += token_ids[first:end]
                    entry.length = length = entry.length + count
                    deliver((entry.request.id, first, end, reason))
                    if state is running:
                        advanced += count
                        # What an entry takes beyond the foreseen is work done, but was never counted as work to do.
                        if (beyond := len(entry.generated) - entry.expected) > 0:
                            unforeseen += min(count, beyond)
                        room = entry.capacity - length
                        # Once when it gets low, and again when it gets urgent.
                        if room < URGENT_ROOM or room < LOW_ROOM <= room + count:
                            self._growth.look_at(entry)
                if reason is not None:
                    self._context += advanced
                    self.work -= advanced - unforeseen
                    served, advanced, unforeseen = advanced, 0, 0
                    applied.served += served
                    (applied.dropped if entry.state is cancelled else applied.finished).append(entry)
                    self._end(entry)
            first = end
        self._context += advanced
        self.work -= advanced - unforeseen
        return advanced

    def _acknowledge(self, orders_applied: int, applied: Applied) -> None:
        """Orders up to this number were applied: what they released has no owner any more."""
        assert orders_applied <= self._number, "orders were applied that were never sent"
        self._applied = orders_applied
        if not self._releasing:
            return
        under_way = []
        for entry in self._releasing:
            if entry.slot < 0:
                continue  # it ended by itself before its release arrived
            if entry.released_by > orders_applied:
                under_way.append(entry)
                continue
            (applied.returning if entry.state is State.PREEMPTED else applied.dropped).append(entry)
            self._end(entry)
        self._releasing = under_way

    # --------------------------------------------------------------------------------------------------------- figures

    def owner(self, slot: int) -> RequestId | None:
        """Whose slot this is; None for nobody's, and for those whose client is gone."""
        entry = self._slots[slot]
        return entry.request.id if entry is not None and entry.state is not State.CANCELLED else None

    @property
    def held(self) -> int:
        """Entries that run, those about to and those whose release is under way."""
        return len(self._slots) - len(self._free_slots)

    @property
    def promised_tokens(self) -> int:
        """Tokens that the entries here may come to have: prompts and all new tokens asked for."""
        return sum(entry.longest + 1 for entry in self._slots if entry is not None)
