"""Clients, a scheduler and its replicas, one small event at a time; after each it is checked that nothing broke a promise.

Driven by Hypothesis (tests/property) and by a seeded source of randomness for as long as one likes (scripts).

Every call goes to two schedulers, whose answers must be equal: the same calls give the same orders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass, field, replace

from block_audit import audit, audit_idle
from replica_world import EOS, FAILING_STEP_TOKEN, FAILING_TOKEN, ReplicaSetup, ReplicaWorld

from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.request import Priority, QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.batch import Batch
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.steps import Deliveries, Failed, Outcome


@dataclass(frozen=True)
class Ask:
    """What a client asks for. Times in seconds from now."""

    prompt: tuple[int, ...]
    new: int
    tenant: str = ""
    priority: Priority = Priority.DEFAULT
    salt: str = ""
    first_token_in: float | None = None
    queue_for: float | None = None
    end_in: float | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False


@dataclass
class Told:
    """What a client was told so far, and what it ought to hear in the end."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    end: FinishReason | FailureCode | None = None
    cancelled: bool = False

    @property
    def is_live(self) -> bool:
        """Whether something is still owed to it."""
        return self.end is None and not self.cancelled

    def whole(self) -> tuple[list[int], FinishReason | FailureCode]:
        """All its tokens and its end, if nothing outside the request ends it."""
        prompt, tokens = self.request.prompt, []
        for number in range(self.request.max_new_tokens):
            token = prompt[number % len(prompt)]
            if token == FAILING_TOKEN:
                return tokens, FailureCode.NUMERICS
            if token == FAILING_STEP_TOKEN:
                return tokens, FailureCode.STEP
            tokens.append(token)
            if token == EOS and not self.request.ignore_eos and len(tokens) < self.request.max_new_tokens:
                return tokens, FinishReason.EOS_TOKEN
        return tokens, FinishReason.LENGTH


class World:
    """See the module. Raises AssertionError at the first promise that is broken."""

    def __init__(self, policy: Policy, replicas: list[ReplicaSetup]) -> None:
        self.policy = policy
        self.now = 1.0
        self.scheduler = Scheduler(policy, len(replicas))
        self._shadow = Scheduler(policy, len(replicas))
        self._setups = replicas
        self.replicas: list[ReplicaWorld | None] = [None] * len(replicas)
        self.draining: set[int] = set()
        self.told: dict[RequestId, Told] = {}
        self.live: dict[RequestId, Told] = {}
        self.counts: Counter[str] = Counter()
        for replica in range(len(replicas)):
            self.open(replica)

    # ------------------------------------------------------------------------------------------------------- replicas

    def open(self, replica: int, blocks: int | None = None) -> None:
        """A session of `replica` begins, if there is none, with a pool of `blocks`, or as before."""
        if self.replicas[replica] is not None:
            return
        self.draining.discard(replica)
        if blocks is not None:
            self._setups[replica] = replace(self._setups[replica], blocks=blocks)
        world = self.replicas[replica] = ReplicaWorld(self._setups[replica])
        deliveries = self.scheduler.open(replica, world.spec, self.now)
        assert deliveries == self._shadow.open(replica, world.spec, self.now)
        for failed in deliveries.failed:
            told = self.told[failed.request_id]
            assert not self.scheduler.fits(len(told.request.prompt), told.request.max_new_tokens)
            self._failed(failed, FailureCode.LOST)

    def lose(self, replica: int) -> None:
        """The stream of `replica` breaks: what was on its way either way is gone."""
        if self.replicas[replica] is None:
            return
        self.replicas[replica] = None
        self.counts["losses"] += 1
        deliveries = self.scheduler.lose(replica, self.now)
        assert deliveries == self._shadow.lose(replica, self.now)
        assert not deliveries.tokens
        for failed in deliveries.failed:
            self._failed(failed, FailureCode.LOST)

    def drain(self, replica: int, draining: bool) -> None:
        """`replica` gets nothing new, or may again."""
        (self.draining.add if draining else self.draining.discard)(replica)
        self.scheduler.drain(replica, draining=draining)
        self._shadow.drain(replica, draining=draining)

    # -------------------------------------------------------------------------------------------------------- clients

    def submit(self, ask: Ask) -> RequestId | None:
        """A request comes; None if it is refused."""
        later = self._later
        service = QualityOfService(
            TenantId(ask.tenant),
            ask.priority,
            ask.salt,
            later(ask.first_token_in),
            later(ask.queue_for),
            later(ask.end_in),
        )
        request = Request(
            RequestId(len(self.told)),
            ask.prompt,
            ask.new,
            qos=service,
            prompt_logprobs=ask.prompt_logprobs,
            ignore_eos=ask.ignore_eos,
        )
        if not self.scheduler.fits(len(ask.prompt), ask.new):
            return None
        wait = self.scheduler.foreseen_wait(service.tenant, self.now)
        assert wait == self._shadow.foreseen_wait(service.tenant, self.now)
        assert wait is None or 0 <= wait < 1e9
        if self.scheduler.is_overfull(request):
            assert self.policy.max_queued_tokens is not None
            self.counts["refusals"] += 1
            return None
        self.told[request.id] = self.live[request.id] = Told(request)
        self.scheduler.submit(request, self.now)
        self._shadow.submit(request, self.now)
        if self.policy.max_queued_tokens is not None and self.scheduler.waiting > 1:
            assert self.scheduler.queued_tokens <= 2 * self.policy.max_queued_tokens + self._sent_back()
        self.counts["requests"] += 1
        return request.id

    def _sent_back(self) -> int:
        return sum(entry.work for entry in self.scheduler._queue if entry.charged)

    def _later(self, seconds: float | None) -> float | None:
        return None if seconds is None else self.now + seconds

    def cancel(self, request_id: RequestId, satisfied: bool = False) -> None:
        """Whoever asked has left, or has all that was wanted."""
        self.scheduler.cancel(request_id, satisfied=satisfied)
        self._shadow.cancel(request_id, satisfied=satisfied)
        if (told := self.live.pop(request_id, None)) is not None:
            told.cancelled = True
            self.counts["cancellations"] += 1

    def pass_time(self, seconds: float) -> None:
        """Seconds go by, and the scheduler is asked whose time is over."""
        self.now += seconds
        deliveries = self.scheduler.expire(self.now)
        assert deliveries == self._shadow.expire(self.now)
        assert not deliveries.tokens
        for failed in deliveries.failed:
            service = self.told[failed.request_id].request.qos
            assert any(by is not None and by <= self.now for by in (service.queue_by, service.end_by))
            self._failed(failed, FailureCode.EXPIRED)
        next_expiry = self.scheduler.next_expiry
        assert next_expiry is None or next_expiry > self.now
        for told in self.live.values():
            assert told.request.qos.end_by is None or told.request.qos.end_by > self.now

    # ------------------------------------------------------------------------------------------------------ decisions

    def dispatch(self) -> None:
        """Queued entries go to replicas."""
        before = {batch.replica: set(batch._placed) for batch in self._batches()}
        given = self.scheduler.dispatch(self.now)
        self.counts["waits for a prefix"] += bool(self.scheduler._aside._waiting)
        assert given == self._shadow.dispatch(self.now)
        assert len(given) == len(set(given))
        for batch in self._batches():
            new = batch._placed.keys() - before[batch.replica]
            assert bool(new) == (batch.replica in given)
            if new:
                assert batch.replica not in self.draining
                assert self.replicas[batch.replica] is not None
            assert len(batch._placed) + len(batch._running) <= self.policy.max_batch_size

    def decide(self, replica: int) -> None:
        """The replica's session asks what it is to order."""
        world = self.replicas[replica]
        orders = self.scheduler.decide(replica, self.now)
        assert orders == self._shadow.decide(replica, self.now)
        if orders is None:
            self._nothing_was_due(replica)
            return
        assert world is not None, "a lost replica gets nothing"
        assert not [*world.sent, *world.inbox], "one set of orders is on its way at a time"
        self._check_chunks(replica, orders.prefill)
        for admission in orders.admit:
            told = self.told[admission.request.id]
            assert told.is_live
            assert list(admission.generated) == told.tokens
            assert not (admission.cached_tokens and told.request.prompt_logprobs and not told.tokens)
            self.counts["admissions"] += 1
            self.counts["hit tokens"] += admission.cached_tokens
        world.sent.append(orders)

    def _check_chunks(self, replica: int, prefill: tuple[tuple[int, int], ...]) -> None:
        batch = self._batch(replica)
        if batch.spec.self_scheduling:
            assert not prefill
            return
        assert len(prefill) == len({slot for slot, _ in prefill})
        assert all(tokens > 0 for _, tokens in prefill)
        assert sum(tokens for _, tokens in prefill) <= self.policy.max_batch_prefill_tokens
        for slot, _ in prefill:
            owner = self.scheduler.owner(replica, slot)
            assert owner is not None, "prefill is spent on nobody"
            assert self.told[owner].is_live
        assert prefill or not self._has_prompts(batch), "a prompt makes progress with every set of orders"

    def _nothing_was_due(self, replica: int) -> None:
        world = self.replicas[replica]
        if world is None or world.sent or world.inbox or world.reports:
            return
        batch = self._batch(replica)
        if batch._number == batch._applied:
            assert not batch._to_release
            assert not self._has_prompts(batch), "a prompt waits for nothing"

    def _has_prompts(self, batch: Batch) -> bool:
        return any(
            entry.unordered for entry in (*batch._placed.values(), *batch._running.values()) if entry.prefill_length
        )

    # -------------------------------------------------------------------------------------------------------- reports

    def orders_arrive(self, replica: int) -> None:
        """What was sent to the replica gets there."""
        if (world := self.replicas[replica]) is not None:
            world.orders_arrive()

    def step(self, replica: int) -> None:
        """The shard passes a boundary and makes a step."""
        if (world := self.replicas[replica]) is not None:
            world.boundary_and_step()

    def reports_arrive(self, replica: int) -> None:
        """What the shard said reaches the scheduler."""
        world = self.replicas[replica]
        while world is not None and world.reports:
            self._record(replica, world.reports.popleft())

    def _record(self, replica: int, outcome: Outcome) -> None:
        deliveries: Deliveries = self.scheduler.apply(replica, outcome, self.now)
        assert deliveries == self._shadow.apply(replica, outcome, self.now)
        for request_id, first, end, reason in deliveries.tokens:
            told = self._owed(request_id)
            told.tokens += outcome.token_ids[first:end]
            assert first < end
            self.counts["tokens"] += end - first
            if reason is not None:
                assert (told.tokens, reason) == told.whole()
                self._ended(request_id, reason)
        for failed in deliveries.failed:
            self._failed(failed, FailureCode.NUMERICS, FailureCode.STEP)

    def _owed(self, request_id: RequestId) -> Told:
        told = self.told[request_id]
        assert told.end is None, "nothing after the end"
        assert not told.cancelled, "nothing after a cancel"
        return told

    def _failed(self, failed: Failed, *kinds: FailureCode) -> None:
        told = self._owed(failed.request_id)
        assert failed.kind in kinds, failed
        assert failed.message
        tokens, end = told.whole()
        assert told.tokens == tokens[: len(told.tokens)]
        if failed.kind is FailureCode.NUMERICS:
            assert (told.tokens, failed.kind) == (tokens, end)
        self._ended(failed.request_id, failed.kind)

    def _ended(self, request_id: RequestId, end: FinishReason | FailureCode) -> None:
        self.told[request_id].end = end
        del self.live[request_id]
        self.counts[end.value] += 1

    # --------------------------------------------------------------------------------------------------------- checks

    def _batches(self) -> list[Batch]:
        return self.scheduler._replicas.serving

    def _batch(self, replica: int) -> Batch:
        batch = self.scheduler._replicas.batches[replica]
        assert batch is not None
        return batch

    @property
    def placed(self) -> list[RequestId]:
        """Requests that left the queue, and of which their replica has not heard yet."""
        return [request_id for batch in self._batches() for request_id in batch._placed]

    def check(self) -> None:
        """Everything that is true at every moment."""
        for batch in self._batches():
            audit(batch)
        known = self.scheduler.requests
        assert self.live.keys() <= set(known), "somebody was forgotten"
        assert len(known) <= len(self.live) + self.scheduler.running
        slots = sum(world.setup.slots for world in self.replicas if world is not None)
        assert self.scheduler.running <= slots

    def finish(self) -> None:
        """Nothing new comes: everything must end, within a bound, and leave nothing behind."""
        # Who fits on a replica that serves does not wait for those that do not.
        self._go_on_until_none(self._served)
        for replica in range(len(self.replicas)):
            self.drain(replica, False)
            self.open(replica)
        self._go_on_until_none(lambda: self.scheduler.requests or [one for one in self.replicas if not _is_quiet(one)])
        self.check()
        audit_idle(self.scheduler)
        assert not self.live
        for world in self.replicas:
            assert world is None or world.engine.running == 0
        self.counts["preemptions"] = self.scheduler.preemptions
        self.counts["moves"] = self.scheduler.moves

    def _served(self) -> list[Told]:
        """Those still live that a replica could hold which serves."""
        rooms = [
            world.spec.num_blocks * world.spec.block_size
            for replica, world in enumerate(self.replicas)
            if world is not None and replica not in self.draining
        ]
        most = max(rooms, default=0)
        requests = [(told, told.request) for told in self.live.values()]
        return [told for told, request in requests if len(request.prompt) + request.max_new_tokens - 1 <= most]

    def _go_on_until_none(self, left: Callable[[], Sized]) -> None:
        # Each token may take a step, and be computed again after a preemption: so many rounds are far too many.
        work = sum(len(told.request.prompt) + told.request.max_new_tokens for told in self.live.values())
        rounds = 0
        while left():
            rounds += 1
            assert rounds <= 200 + 20 * work, "somebody starves"
            self.dispatch()
            for replica in range(len(self.replicas)):
                self.decide(replica)
                self.orders_arrive(replica)
                self.step(replica)
                self.reports_arrive(replica)


def _is_quiet(world: ReplicaWorld | None) -> bool:
    return world is None or world.is_quiet
