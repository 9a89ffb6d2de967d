"""Rig: a scheduler with simple replicas that follow orders at once, for tests of one rule at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode, FinishReason, Grammar, LogprobOptions
from text_generation_router.request import QualityOfService, Request, RequestId, RequestProgress
from text_generation_router.scheduling.messages import (
    Deliveries,
    Placement,
    ReplicaSpec,
    SchedulerOutput,
    StepOutput,
)
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.scheduler import Scheduler

BLOCK = 16
TOKEN = 7
"""The id of all new tokens."""


def a_policy(**changes: object) -> Policy:
    return replace(Policy(max_batch_prefill_tokens=64, max_batch_size=8), **changes)  # type: ignore[arg-type]


def words(start: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens that share no position with those of another `start`."""
    return tuple(1000 * start + number for number in range(count))


@dataclass
class Sequence:
    """A sequence on a replica."""

    placement: Placement
    to_prefill: int
    room: list[int]
    """Free positions in the blocks of each group."""
    left: int


@dataclass
class Rig:
    """A scheduler with `replicas` serving replicas of `blocks` blocks each."""

    policy: Policy
    blocks: int = 100
    slots: int = 8
    replicas: int = 1
    now: float = 0.0
    step_s: float = 0.01
    self_scheduling: bool = False
    """Replicas schedule for themselves and have room for any sequence."""
    tokens_per_step: int = 1
    """New tokens of a sequence in a step, if its blocks have room."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters of replicas that are opened from now on."""
    windows: tuple[CacheGroup, ...] = ()
    """The groups of the cache after the first."""
    max_loras: int = 0
    """Most different ones of their sequences."""
    orders: list[tuple[int, SchedulerOutput]] = field(default_factory=list)
    """(replica, orders), all so far."""
    tokens: dict[int, int] = field(default_factory=dict)
    """New tokens by request."""
    failed: dict[int, FailureCode] = field(default_factory=dict)
    messages: dict[int, str] = field(default_factory=dict)
    """Error messages by request."""
    finished: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.policy, self.replicas)
        self.sequences: list[dict[int, Sequence]] = [{} for _ in range(self.replicas)]
        self.applied = [0] * self.replicas
        """Numbers of the last orders of each replica."""
        self.submitted = 0
        for replica in range(self.replicas):
            self.open(replica)

    def open(self, replica: int, blocks: int | None = None) -> None:
        self.sequences[replica], self.applied[replica] = {}, 0
        self.receive(self.scheduler.open(replica, self.spec(self.blocks if blocks is None else blocks)))

    def spec(self, blocks: int) -> ReplicaSpec:
        return ReplicaSpec(
            self.slots,
            blocks,
            BLOCK,
            self_scheduling=self.self_scheduling,
            adapters=self.adapters,
            further_groups=self.windows,
            max_loras=self.max_loras,
            tokens_per_step=self.tokens_per_step,
        )

    def open_again(self, replica: int) -> None:
        self.lose(replica)
        self.open(replica)

    def lose(self, replica: int) -> None:
        self.sequences[replica] = {}
        self.receive(self.scheduler.lose(replica))

    def submit(
        self,
        prompt: tuple[int, ...] | int = 4,
        new: int = 10,
        *,
        prompt_logprobs: bool = False,
        grammar: Grammar | None = None,
        adapter: str = "",
        progress: RequestProgress | None = None,
        turn_ends: tuple[int, ...] = (),
        **service: object,
    ) -> int:
        """Submit a request for `prompt`, or for a unique prompt of that length; return its number."""
        number = self.submitted
        self.submitted += 1
        if isinstance(prompt, int):
            prompt = words(number + 1, prompt)
        request = Request(
            RequestId(number),
            prompt,
            new,
            logprobs=LogprobOptions(prompt=prompt_logprobs),
            grammar=grammar,
            adapter=adapter,
            turn_ends=turn_ends,
            qos=QualityOfService(**service),  # type: ignore[arg-type]
        )
        self.receive(self.scheduler.submit(request, self.now, progress))
        return number

    def serve(self, *args: int | tuple[int, ...], **options: object) -> int:
        """Submit a request and run turns until all have ended; return its number."""
        number = self.submit(*args, **options)  # type: ignore[arg-type]
        self.until_idle()
        return number

    def order(self, replica: int = 0) -> SchedulerOutput:
        """Dispatch, and return the orders for a replica, which are due and not sent to it."""
        self.scheduler.dispatch()
        orders = self.scheduler.schedule(replica)
        assert orders is not None
        return orders

    def cached(self, request: int) -> int:
        """Return the cached tokens of the last placement of the request."""
        return self.placement(request).cached_tokens

    def replica(self, number: int = 0) -> ReplicaScheduler:
        replica = self.scheduler.replicas[number]
        assert replica is not None
        return replica

    def turn(self) -> list[SchedulerOutput]:
        """Dispatch, then send orders and make a step on each replica. Return the orders."""
        self.scheduler.dispatch()
        ordered = []
        for replica in range(self.replicas):
            if (orders := self.scheduler.schedule(replica)) is not None:
                ordered.append(orders)
                self.orders.append((replica, orders))
                self.applied[replica] = orders.number
            self.step(replica, orders)
        self.now += self.step_s
        return ordered

    def turns(self, count: int) -> list[SchedulerOutput]:
        return [orders for _ in range(count) for orders in self.turn()]

    def until_idle(self, most: int = 2000) -> None:
        """Run turns until all requests have ended."""
        for _ in range(most):
            if not self.scheduler.requests:
                return
            self.turn()
        raise AssertionError("a request never ends")

    def step(self, replica: int, orders: SchedulerOutput | None) -> None:
        """Apply orders and make a step on a replica."""
        if self.scheduler.replicas[replica] is None:
            return
        here = self.sequences[replica]
        chunks = self.take_orders(here, orders) if orders is not None else {}
        output = StepOutput(self.applied[replica], [], [], [], prefilled=list(chunks.items()), step_s=self.step_s)
        slots: list[int] = []
        counts: list[int] = []
        for slot, sequence in list(here.items()):
            if slot in chunks:
                sequence.to_prefill -= chunks[slot]
            if sequence.to_prefill or min(sequence.room) < 0:
                continue
            # The first token comes with the prompt, without drafts.
            count = 1 if slot in chunks else min(self.tokens_per_step, min(sequence.room) + 1, sequence.left)
            sequence.room = [room - count for room in sequence.room]
            sequence.left -= count
            slots.append(slot)
            counts.append(count)
            if not sequence.left:
                output.finished[slot] = FinishReason.LENGTH
                del here[slot]
        output.slots, output.token_ids = slots, [TOKEN] * sum(counts)
        if self.tokens_per_step > 1:
            output.token_counts = counts
        self.apply(replica, output)

    def take_orders(self, here: dict[int, Sequence], orders: SchedulerOutput) -> dict[int, int]:
        for slot in orders.release:
            here.pop(slot, None)
        for placement in orders.placements:
            assert placement.slot not in here
            known = len(placement.request.prompt) + len(placement.generated)
            here[placement.slot] = Sequence(
                placement,
                known - placement.cached_tokens,
                [
                    end * BLOCK - known
                    for end in (
                        len(placement.blocks),
                        *(
                            1 << 20 if group.is_state else first + len(own)
                            for group, (first, own) in zip(self.windows, placement.further_blocks, strict=True)
                        ),
                    )
                ],
                placement.request.max_new_tokens - len(placement.generated),
            )
        for group, allocations in enumerate((orders.allocations, *orders.further_allocations)):
            for slot, blocks in allocations:
                if slot in here:
                    here[slot].room[group] += len(blocks) * BLOCK
        if not self.self_scheduling:
            return dict(orders.prefill)
        for sequence in here.values():
            sequence.to_prefill, sequence.room = 0, [1 << 20]
        return {}

    def apply(self, replica: int, output: StepOutput) -> Deliveries:
        self.applied[replica] = output.orders_applied
        deliveries = self.scheduler.update(replica, output, self.now)
        for request_id, first, end, reason in deliveries.tokens:
            self.tokens[request_id] = self.tokens.get(request_id, 0) + end - first
            if reason is not None:
                self.finished.append(request_id)
        self.receive(deliveries)
        return deliveries

    def receive(self, deliveries: Deliveries) -> None:
        for failed in deliveries.failed:
            assert failed.request_id not in self.failed
            self.failed[failed.request_id] = failed.kind
            self.messages[failed.request_id] = failed.message

    def expire(self) -> None:
        self.receive(self.scheduler.expire(self.now))

    def placements(self, request: int) -> list[tuple[int, Placement]]:
        """Return (replica, placement) for each placement of the request."""
        return [
            (replica, placement)
            for replica, orders in self.orders
            for placement in orders.placements
            if placement.request.id == request
        ]

    def placement(self, request: int) -> Placement:
        """Return the last placement of the request."""
        return self.placements(request)[-1][1]

    def replica_of(self, request: int) -> int:
        """Return the replica of the last placement."""
        return self.placements(request)[-1][0]

    def placed(self) -> list[int]:
        """Return the placed requests in order."""
        return [placement.request.id for _, orders in self.orders for placement in orders.placements]
