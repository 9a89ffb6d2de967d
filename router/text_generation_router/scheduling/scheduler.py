"""The Scheduler: who leaves the queue, what the next step prefills, who grows, who is preempted.

Pure: no clock, no socket, no log, no task, no randomness. Values in, values out; the same calls give the same orders.

    submit(request), cancel(id)     what clients want
    decide() -> Orders | None       what is to change at the replica's next step boundary
    apply(outcome) -> Deliveries    what a step brought, and who is to hear of it

One set of orders is on its way at a time. The replica free-runs meanwhile, and every sequence stops by itself at the end
of its grant, so nothing here has to keep pace with the steps.

KV blocks. An entry is granted what its prompt needs and a little growth. When its room shrinks below LOW_ROOM it wants
more; the wish rides on the next orders, and makes orders of its own only below URGENT_ROOM, so that a step boundary
stays free for a newcomer's prefill. When the pool runs dry, the newest entry is preempted: released, and put back at
the head of the queue with what it generated as part of its prompt. The oldest entry is never preempted for another's
sake, and a request that could not finish alone is not accepted, so something always gets on.

A slot and its blocks have their next owner only after a report showed that the release was applied.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import repeat

from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.blocks import BlockPool
from text_generation_router.scheduling.entry import Entry, State
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.steps import Admission, Deliveries, Failed, Orders, Outcome

LOW_ROOM = 24
"""Tokens of room below which an entry wants blocks."""
URGENT_ROOM = 8
"""Tokens of room below which it should not wait any longer."""
FULL_ROOM = 40
"""Tokens of room that a grant restores, if the pool has it."""


class Scheduler:
    """Owns the queue, the slots and the KV blocks of one replica."""

    def __init__(self, blocks: BlockPool, num_slots: int, policy: Policy) -> None:
        self._pool = blocks
        self._policy = policy
        self._slots: list[Entry | None] = [None] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._entries: dict[RequestId, Entry] = {}
        self._waiting: OrderedDict[RequestId, Entry] = OrderedDict()
        self._running: dict[RequestId, Entry] = {}
        self._prefilling: dict[RequestId, Entry] = {}
        """Running entries whose prompt is not wholly ordered yet, in order of admission."""
        self._hungry: dict[RequestId, Entry] = {}
        """Running entries that want blocks."""
        self._urgent = False
        self._to_release: list[Entry] = []
        self._releasing: list[Entry] = []
        self._arrivals = 0
        self._number = 0
        self._applied = 0
        self._steps_since_admission = 0
        self._preemptions = 0
        self._cancellations = 0

    # ------------------------------------------------------------------------------------------------ what clients want

    def fits(self, prompt_tokens: int, max_new_tokens: int) -> bool:
        """Whether such a request could run alone."""
        return self._pool.blocks_for(prompt_tokens + max_new_tokens - 1) <= self._pool.num_blocks

    def submit(self, request: Request) -> None:
        """Queue `request`, which must fit."""
        assert request.id not in self._entries, "a request is submitted once"
        assert self.fits(len(request.prompt), request.max_new_tokens), "a request must be able to run alone"
        self._arrivals += 1
        entry = Entry(request, self._arrivals)
        self._entries[request.id] = entry
        self._waiting[request.id] = entry

    def cancel(self, request_id: RequestId) -> None:
        """Nobody waits for this request any more. Idempotent; unknown and ended requests are no news."""
        entry = self._entries.get(request_id)
        if entry is None or entry.state is State.CANCELLED:
            return
        self._cancellations += 1
        if entry.state is State.WAITING:
            del self._waiting[request_id]
            del self._entries[request_id]
        elif entry.state is State.RUNNING:
            self._release(entry, State.CANCELLED)
        else:
            entry.state = State.CANCELLED

    # ------------------------------------------------------------------------------------------------------- decisions

    def decide(self) -> Orders | None:
        """What is to change at the next step boundary; None while orders are on their way, or nothing is to change."""
        if self._number > self._applied:
            return None
        grants = self._grow()
        prefill = self._continue_prefills()
        budget = self._policy.max_batch_prefill_tokens - sum(tokens for _, tokens in prefill)
        running, steps = len(self._running), self._steps_since_admission
        admit = self._admit(budget, prefill)
        released = self._to_release
        if not (released or grants or prefill):
            return None
        self._number += 1
        for entry in released:
            entry.released_by = self._number
        self._releasing += released
        self._to_release = []
        newcomers_join = bool(admit) and running > 0
        joined = self._policy.join_reason(running=running, steps_since_admission=steps) if newcomers_join else None
        return Orders(
            number=self._number,
            release=tuple(entry.slot for entry in released),
            admit=tuple(admit),
            grants=tuple(grants),
            prefill=tuple(prefill),
            joined=joined,
        )

    @property
    def wants_orders(self) -> bool:
        """Whether `decide` may have something to say. False is certain, and costs nothing to find out."""
        return bool(self._waiting or self._to_release or self._prefilling or self._urgent)

    def _continue_prefills(self) -> list[tuple[int, int]]:
        budget = self._policy.max_batch_prefill_tokens
        chunks: list[tuple[int, int]] = []
        for entry in list(self._prefilling.values()):
            if budget == 0:
                break
            chunk = self._order_chunk(entry, budget)
            chunks.append((entry.slot, chunk))
            budget -= chunk
        return chunks

    def _order_chunk(self, entry: Entry, budget: int) -> int:
        chunk = min(entry.prefill_length - entry.ordered, budget)
        entry.ordered += chunk
        if entry.ordered == entry.prefill_length:
            self._prefilling.pop(entry.request.id, None)
        else:
            self._prefilling[entry.request.id] = entry
        return chunk

    def _admit(self, budget: int, prefill: list[tuple[int, int]]) -> list[Admission]:
        """Move entries from the queue to slots while budget, slots and blocks last; first come, first served."""
        admitted: list[Admission] = []
        if not self._waiting or not self._policy.may_admit(
            waiting=len(self._waiting),
            running=len(self._running),
            steps_since_admission=self._steps_since_admission,
        ):
            return admitted
        while self._waiting and budget > 0 and self._free_slots and len(self._running) < self._policy.max_batch_size:
            entry = next(iter(self._waiting.values()))
            needed = self._pool.blocks_for(entry.length)
            # Whoever runs will grow: an admission that took the last blocks would be preempted at once.
            if needed + len(self._running) > self._pool.free:
                break
            self._waiting.popitem(last=False)
            admission = self._start(entry, self._growth(entry, needed))
            chunk = self._order_chunk(entry, budget)
            prefill.append((entry.slot, chunk))
            budget -= chunk
            admitted.append(admission)
        if admitted:
            self._steps_since_admission = 0
        return admitted

    def _growth(self, entry: Entry, needed: int) -> int:
        """Blocks to admit with: the prompt's and room to grow into, while that leaves the others something."""
        wanted = self._pool.blocks_for(min(entry.length + FULL_ROOM, entry.longest))
        return wanted if wanted + len(self._running) <= self._pool.free else needed

    def _start(self, entry: Entry, blocks: int) -> Admission:
        entry.state = State.RUNNING
        entry.slot = self._free_slots.pop()
        self._give(entry, self._pool.take(blocks))
        entry.prefill_length = entry.length
        entry.ordered = 0
        entry.released_by = 0
        self._slots[entry.slot] = entry
        self._running[entry.request.id] = entry
        self._look_at_room(entry)
        return Admission(entry.slot, entry.request, tuple(entry.generated), tuple(entry.blocks))

    def _give(self, entry: Entry, blocks: tuple[int, ...]) -> None:
        entry.blocks += blocks
        entry.capacity = len(entry.blocks) * self._pool.block_size

    def _look_at_room(self, entry: Entry) -> None:
        room = entry.capacity - entry.length
        if room < LOW_ROOM and entry.capacity < entry.longest:
            self._hungry[entry.request.id] = entry
            self._urgent = self._urgent or room < URGENT_ROOM

    def _grow(self) -> list[tuple[int, tuple[int, ...]]]:
        """Grant blocks to whoever wants them, oldest first; preempt the newest if somebody cannot go on without."""
        if not self._urgent:
            return []
        grants: list[tuple[int, tuple[int, ...]]] = []
        for entry in sorted(self._hungry.values(), key=lambda entry: entry.arrival):
            if entry.state is not State.RUNNING:
                continue
            if blocks := self._pool.take(self._affordable_growth(entry)):
                self._give(entry, blocks)
                grants.append((entry.slot, blocks))
                del self._hungry[entry.request.id]
            elif self._is_stalled(entry) and not self._blocks_are_coming():
                self._release(max(self._running.values(), key=lambda entry: entry.arrival), State.PREEMPTED)
        self._urgent = any(entry.capacity - entry.length < URGENT_ROOM for entry in self._hungry.values())
        return grants

    def _affordable_growth(self, entry: Entry) -> int:
        """Blocks to grant now: back to FULL_ROOM while the pool is rich, just the next one while it is not."""
        most = self._pool.blocks_for(min(entry.length + FULL_ROOM, entry.longest)) - len(entry.blocks)
        if self._pool.free >= most + len(self._running):
            return most
        return min(1, most, self._pool.free)

    def _is_stalled(self, entry: Entry) -> bool:
        return entry.length > entry.capacity

    def _blocks_are_coming(self) -> bool:
        """Releases under way that will fill the pool without another preemption."""
        return any(entry.blocks for entry in (*self._to_release, *self._releasing))

    def _release(self, entry: Entry, state: State) -> None:
        if state is State.PREEMPTED:
            self._preemptions += 1
        entry.state = state
        self._leave(entry)
        self._to_release.append(entry)

    def _leave(self, entry: Entry) -> None:
        """`entry` runs no more; it may still hold its slot and blocks."""
        self._running.pop(entry.request.id, None)
        self._prefilling.pop(entry.request.id, None)
        self._hungry.pop(entry.request.id, None)

    # -------------------------------------------------------------------------------------------------------- outcomes

    def apply(self, outcome: Outcome) -> Deliveries:
        """Record what a step brought."""
        deliveries = Deliveries()
        self._record_tokens(outcome, deliveries)
        for slot, (kind, message) in outcome.failed.items():
            if entry := self._slots[slot]:
                if entry.state is not State.CANCELLED:
                    deliveries.failed.append(Failed(entry.request.id, kind, message))
                self._end(entry)
        for slot in outcome.finished:
            assert self._slots[slot] is None, "a sequence finishes with a token"
        self._acknowledge(outcome.orders_applied)
        if outcome.slots:
            self._steps_since_admission += 1
        return deliveries

    def _record_tokens(self, outcome: Outcome, deliveries: Deliveries) -> None:
        # Runs once a token: plain locals, no properties.
        slots, finished, token_ids = self._slots, outcome.finished, outcome.token_ids
        deliver = deliveries.tokens.append
        first = 0
        for slot, count in zip(outcome.slots, outcome.token_counts or repeat(1), strict=False):
            end = first + count
            entry = slots[slot]
            if entry is not None:
                reason = finished.get(slot)
                if entry.state is not State.CANCELLED:
                    entry.generated += token_ids[first:end]
                    entry.length += count
                    deliver((entry.request.id, first, end, reason))
                    if entry.capacity - entry.length < LOW_ROOM and entry.state is State.RUNNING:
                        self._look_at_room(entry)
                if reason is not None:
                    self._end(entry)
            first = end

    def _acknowledge(self, orders_applied: int) -> None:
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
            preempted = entry.state is State.PREEMPTED
            self._end(entry)
            if preempted:
                entry.state = State.WAITING
                self._entries[entry.request.id] = entry
                self._waiting[entry.request.id] = entry
                self._waiting.move_to_end(entry.request.id, last=False)
        self._releasing = under_way

    def _end(self, entry: Entry) -> None:
        """`entry` holds nothing any more and is forgotten."""
        self._leave(entry)
        self._entries.pop(entry.request.id, None)
        self._pool.give_back(entry.blocks)
        entry.blocks = []
        entry.capacity = 0
        self._slots[entry.slot] = None
        self._free_slots.append(entry.slot)
        entry.slot = -1
        if entry in self._to_release:
            self._to_release.remove(entry)

    # --------------------------------------------------------------------------------------------------------- figures

    def owner(self, slot: int) -> RequestId | None:
        """Whose slot this is; None for nobody's, and for those whose client is gone."""
        entry = self._slots[slot]
        return entry.request.id if entry is not None and entry.state is not State.CANCELLED else None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that run, and those whose release is under way."""
        return len(self._slots) - len(self._free_slots)

    @property
    def used_blocks(self) -> int:
        """KV blocks with an owner."""
        return self._pool.used

    @property
    def used_tokens(self) -> int:
        """The same in tokens."""
        return self._pool.used * self._pool.block_size

    @property
    def promised_tokens(self) -> int:
        """Tokens that the requests with a slot may come to have: prompts and all new tokens asked for."""
        return sum(entry.longest + 1 for entry in self._slots if entry is not None)

    @property
    def num_blocks(self) -> int:
        """KV blocks there are."""
        return self._pool.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens a KV block holds."""
        return self._pool.block_size

    @property
    def preemptions(self) -> int:
        """Entries taken back to the queue, ever."""
        return self._preemptions

    @property
    def cancellations(self) -> int:
        """Entries dropped before their own end, ever: nobody waited any more, or a stop string was found."""
        return self._cancellations

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Every request not ended, in order of arrival."""
        return tuple(self._entries)
