"""SchedulerWorld: clients, a scheduler and its replicas. One small event at a time, with checks after each.

Driven by Hypothesis (tests/property) and by seeded random events (`world_traffic.play`).
"""

from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass, field, replace
from random import Random

from replica_world import EOS, FAILING_STEP_TOKEN, FAILING_TOKEN, ReplicaSetup, ReplicaWorld
from scheduler_checks import assert_idle, check_scheduler

from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.request import NO_MOVES, Moves, Request, RequestId, RequestProgress
from text_generation_router.scheduling.messages import Deliveries, Failed, SchedulerOutput, StepOutput
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler


@dataclass
class ClientView:
    """The tokens and the end that a client has received."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    end: FinishReason | FailureCode | None = None
    cancelled: bool = False
    moves: Moves = NO_MOVES
    placed_with: int | None = None
    """Tokens at its last placement; None while it has no replica."""

    def lost(self) -> None:
        """Count the loss of its replica, if it has one."""
        if self.placed_with is not None:
            self.moves = self.moves.after_loss(advanced=len(self.tokens) > self.placed_with)
            self.placed_with = None

    @property
    def is_live(self) -> bool:
        return self.end is None and not self.cancelled

    def expected(self) -> tuple[list[int], FinishReason | FailureCode]:
        """Return the tokens and the end of the request if nothing outside ends it: the echo engine repeats the prompt."""
        prompt, tokens = self.request.prompt[:: -1 if self.request.adapter else 1], []
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


class SchedulerWorld:
    """A scheduler with replicas and clients. Methods raise AssertionError when the scheduler breaks a rule."""

    def __init__(self, policy: Policy, replicas: list[ReplicaSetup]) -> None:
        self.policy = policy
        self.now = 1.0
        self.scheduler = Scheduler(policy, len(replicas))
        self._setups = dict(enumerate(replicas))
        self.replicas: dict[int, ReplicaWorld | None] = dict.fromkeys(self._setups)
        self._lost: dict[int, ReplicaWorld] = {}  # they may still copy
        self.views: dict[RequestId, ClientView] = {}
        self.live: dict[RequestId, ClientView] = {}
        self.resubmitted: set[RequestId] = set()
        """Requests that a former scheduler had accepted."""
        self.counts: Counter[str] = Counter()
        self.history: list[Deliveries | SchedulerOutput | list[int] | float | None] = []
        """All answers of the scheduler."""
        for replica in self.replicas:
            self.open(replica)

    def open(self, replica: int, blocks: int | None = None) -> None:
        """Start a session of `replica` if there is none, with a pool of `blocks` or the previous size."""
        if self.replicas[replica] is not None:
            return
        if blocks is not None:
            self._setups[replica] = replace(self._setups[replica], blocks=blocks)
        if (lost := self._lost.pop(replica, None)) is not None:
            lost.engine.reset()
        world = self.replicas[replica] = ReplicaWorld(self._setups[replica])
        self._unfit(self.scheduler.open(replica, world.spec))

    def _unfit(self, deliveries: Deliveries) -> None:
        self.history.append(deliveries)
        for failed in deliveries.failed:
            view = self.views[failed.request_id]
            request = view.request
            fits = self.scheduler.capacity.fits(len(request.prompt), request.max_new_tokens, request.adapter)
            assert not fits or not self._can_move(view)
            self._failed(failed, FailureCode.LOST)

    def _can_move(self, view: ClientView) -> bool:
        self_scheduling = any(setup.self_scheduling for setup in self._setups.values())
        at_prompt = not (self_scheduling and view.request.grammar and view.tokens)
        return at_prompt and view.moves.fruitless <= self.policy.max_request_moves

    def restart(self, joined_first: bool) -> None:
        """Replace the scheduler; replicas drop their sequences. Clients hand over live requests, before or after replicas join."""
        stats = self.scheduler.stats()
        self.counts["restarts"] += 1
        self.counts["moves"] += stats.moves
        self.counts["preemptions"] += stats.preemptions
        worlds = [self.replicas.get(number) or self._lost.get(number) for number in self._setups]
        self.scheduler = Scheduler(self.policy, 0)
        self._setups = {self.scheduler.add(): setup for setup in self._setups.values()}
        self._lost = {number: world for number, world in zip(self._setups, worlds, strict=True) if world is not None}
        self.replicas = dict.fromkeys(self._setups)
        if joined_first:
            for replica in self.replicas:
                self.open(replica)
        for request_id, view in list(self.live.items()):
            view.lost()
            self.counts["resumed"] += bool(view.tokens)
            self.resubmitted.add(request_id)
            self._unfit(self.scheduler.submit(view.request, self.now, RequestProgress(tuple(view.tokens), view.moves)))
            assert not joined_first or request_id not in self.live or self._can_move(view)

    def add(self, like: int) -> None:
        """Let a replica with the setup of another one join."""
        replica = self.scheduler.add()
        assert replica not in self._setups, "a number is used once"
        self._setups[replica], self.replicas[replica] = self._setups[like], None
        self.counts["joins"] += 1
        self.open(replica)

    def remove(self, replica: int) -> None:
        """Let a replica leave, running requests or not. One stays: it may not serve."""
        if len(self.replicas) > 1:
            self.lose(replica)
            if (lost := self._lost.pop(replica, None)) is not None:
                lost.engine.reset()
            del self.replicas[replica]
            self.counts["leaves"] += 1
            self._unfit(self.scheduler.remove(replica))
            assert self.scheduler.stats().num_replicas == len(self.replicas)

    def lose(self, replica: int) -> None:
        """Break the stream of `replica`: messages under way are gone."""
        if (world := self.replicas[replica]) is None:
            return
        self._lost[replica], self.replicas[replica] = world, None
        self.counts["losses"] += 1
        deliveries = self.scheduler.lose(replica)
        self.history.append(deliveries)
        for request_id in deliveries.moved:
            self.views[request_id].lost()
        assert not deliveries.tokens
        for failed in deliveries.failed:
            self._failed(failed, FailureCode.LOST)

    def spoil(self, draw: Random) -> None:
        """Damage half of the blocks of hosts: their checksums are wrong."""
        for host in {setup.host for setup in self._setups.values() if setup.host is not None}:
            host.spoil(draw)

    def drain(self, replica: int, draining: bool) -> None:
        self.scheduler.drain(replica, draining=draining)
        if draining and self.scheduler.replicas[replica] is not None:
            running = self.scheduler.stats().running
            self.scheduler.evacuate(replica)
            self.counts["evacuated"] += any(each.cache.host for each in self.scheduler.available) and running > 0

    def submit(self, request: Request) -> None:
        """Submit a request, unless it is refused."""
        if not self.scheduler.capacity.fits(len(request.prompt), request.max_new_tokens, request.adapter):
            return
        wait = self.scheduler.estimated_wait(request.qos.tenant)
        self.history.append(wait)
        assert wait is None or 0 <= wait < 1e9
        if self.scheduler.exceeds_queue_limit(request):
            assert self.policy.max_queued_tokens is not None
            self.counts["refusals"] += 1
            return
        self.views[request.id] = self.live[request.id] = ClientView(request)
        self.scheduler.submit(request, self.now)
        if self.policy.max_queued_tokens is not None and len(self.scheduler.queue) > 1:
            requeued = sum(
                sequence.work
                for sequence in self.scheduler.queue
                if sequence.requeued or sequence.id in self.resubmitted
            )
            assert self.scheduler.queue.work <= 2 * self.policy.max_queued_tokens + requeued
        self.counts["requests"] += 1

    def cancel(self, request_id: RequestId, satisfied: bool = False) -> None:
        self.scheduler.cancel(request_id, satisfied=satisfied)
        if (view := self.live.pop(request_id, None)) is not None:
            view.cancelled = True
            self.counts["cancellations"] += 1

    def pass_time(self, seconds: float) -> None:
        """Advance the clock and expire requests."""
        self.now += seconds
        deliveries = self.scheduler.expire(self.now)
        self.history.append(deliveries)
        assert not deliveries.tokens
        for failed in deliveries.failed:
            qos = self.views[failed.request_id].request.qos
            assert any(by is not None and by <= self.now for by in (qos.queue_by, qos.end_by))
            self._failed(failed, FailureCode.EXPIRED)
        next_expiry = self.scheduler.next_expiry
        assert next_expiry is None or next_expiry > self.now
        for sequence in self.scheduler.queue:
            qos = sequence.request.qos
            assert sequence.requeued or qos.queue_by is None or qos.queue_by > self.now
        for view in self.live.values():
            assert view.request.qos.end_by is None or view.request.qos.end_by > self.now

    def dispatch(self) -> None:
        before = self._placed_by_replica()
        placed = self.scheduler.dispatch()
        self.history.append(placed)
        self.counts["skipped"] += any(sequence.skipped for sequence in self.scheduler.queue)
        after = self._placed_by_replica()
        assert sorted(placed) == [replica for replica in after if after[replica] - before[replica]]
        assert not set(placed) & self.scheduler.draining
        assert all(self.replicas[replica] is not None for replica in placed)

    def schedule(self, replica: int) -> None:
        """Send the replica its next orders, if there are any."""
        world = self.replicas[replica]
        may_have_orders = self.scheduler.may_have_orders(replica)
        orders = self.scheduler.schedule(replica)
        self.history.append(orders)
        if orders is None:
            self._check_none_was_due(replica)
            return
        assert may_have_orders
        assert world is not None, "a lost replica gets no orders"
        assert not [*world.sent, *world.inbox], "one set of orders is under way at a time"
        self._check_chunks(replica, orders.prefill)
        for placement in orders.placements:
            view = self.views[placement.request.id]
            assert view.is_live
            assert list(placement.generated) == view.tokens
            view.placed_with = len(view.tokens)
            assert not (placement.cached_tokens and view.request.logprobs.prompt and not view.tokens)
            if world.spec.self_scheduling and view.request.grammar:
                assert not view.tokens, "such an engine cannot start in the middle of a grammar"
            self.counts["placements"] += 1
            self.counts["hit tokens"] += placement.cached_tokens
        for copy in orders.copies:
            self.counts["loads" if copy.is_load else "stores"] += 1
        world.sent.append(orders)

    def _check_chunks(self, replica: int, prefill: tuple[tuple[int, int], ...]) -> None:
        scheduler = self.scheduler.replicas[replica]
        assert scheduler is not None
        if scheduler.spec.self_scheduling:
            assert not prefill
            return
        assert len(prefill) == len({slot for slot, _ in prefill})
        assert all(tokens > 0 for _, tokens in prefill)
        assert sum(tokens for _, tokens in prefill) <= self.policy.max_batch_prefill_tokens, "over the token budget"
        for slot, _ in prefill:
            request_id = self.scheduler.request_in(replica, slot)
            assert request_id is not None, "prefill only for live requests"
            assert self.views[request_id].is_live
        if not scheduler.spec.further_groups:  # else blocks may be missing
            assert prefill or not scheduler.prompts.unscheduled, "prompts advance with each set of orders"

    def _check_none_was_due(self, replica: int) -> None:
        world, scheduler = self.replicas[replica], self.scheduler.replicas[replica]
        if world is None or scheduler is None or world.sent or world.inbox or world.reports:
            return
        if world.applied == scheduler.orders_sent:
            prompts = scheduler.prompts
            # A prompt may wait for blocks of a group after the first that a chunk, a decoding sequence or a store gives back.
            busy = (
                scheduler.copies.is_storing
                or scheduler.occupied_slots > len(prompts)
                or any(each.num_scheduled_tokens > each.num_computed_tokens for each in prompts)
            )
            assert (busy and scheduler.spec.further_groups) or not prompts.unscheduled, "a prompt waits for nothing"

    def orders_arrive(self, replica: int) -> None:
        if (world := self.replicas[replica]) is not None:
            world.orders_arrive()

    def step(self, replica: int) -> None:
        """Let the shard pass a boundary and make a step."""
        if (world := self.replicas[replica]) is not None:
            world.boundary_and_step()

    def reports_arrive(self, replica: int) -> None:
        world = self.replicas[replica]
        while world is not None and world.reports:
            self._update(replica, world.reports.popleft())

    def _update(self, replica: int, output: StepOutput) -> None:
        self.counts["failed loads"] += sum(bool(copy.failed) for copy in output.copied)
        deliveries = self.scheduler.update(replica, output, self.now)
        self.history.append(deliveries)
        for request_id, start, end, reason in deliveries.tokens:
            view = self._unfinished(request_id)
            view.tokens += output.token_ids[start:end]
            assert start < end
            self.counts["tokens"] += end - start
            if reason is not None:
                assert (view.tokens, reason) == view.expected()
                self._ended(request_id, reason)
        for failed in deliveries.failed:
            self._failed(failed, FailureCode.NUMERICS, FailureCode.STEP)

    def _unfinished(self, request_id: RequestId) -> ClientView:
        view = self.views[request_id]
        assert view.end is None, "nothing after the end"
        assert not view.cancelled, "nothing after a cancel"
        return view

    def _failed(self, failed: Failed, *kinds: FailureCode) -> None:
        view = self._unfinished(failed.request_id)
        assert failed.kind in kinds, failed
        assert failed.message
        tokens, end = view.expected()
        assert view.tokens == tokens[: len(view.tokens)]
        if failed.kind is FailureCode.NUMERICS:
            assert (view.tokens, failed.kind) == (tokens, end)
        self._ended(failed.request_id, failed.kind)

    def _ended(self, request_id: RequestId, end: FinishReason | FailureCode) -> None:
        self.views[request_id].end = end
        del self.live[request_id]
        self.counts[end.value] += 1

    def _placed_by_replica(self) -> dict[int, set[RequestId]]:
        replicas = (replica for replica in self.scheduler.replicas.values() if replica is not None)
        return {replica.replica: set(replica._placed) for replica in replicas}

    @property
    def placed(self) -> list[RequestId]:
        """Requests that left the queue and were not sent yet."""
        return [request_id for placed in self._placed_by_replica().values() for request_id in sorted(placed)]

    def check(self) -> None:
        """Check the rules that hold at all times."""
        check_scheduler(self.scheduler)
        known, running = self.scheduler.requests, self.scheduler.stats().running
        assert self.live.keys() <= set(known), "a request was forgotten"
        assert len(known) <= len(self.live) + running
        assert running <= sum(world.setup.slots for world in self.replicas.values() if world is not None)

    def finish(self) -> None:
        """Submit nothing more. Check that all requests end within a bound and leave nothing behind."""
        # First those that fit on a serving replica: they do not wait for the others.
        self._run_until_empty(self._servable)
        for replica in self.replicas:
            self.drain(replica, False)
            self.open(replica)
        self._run_until_empty(
            lambda: (
                self.scheduler.requests
                or [world for world in self.replicas.values() if world and not world.is_quiet]
                or [each for each in self.scheduler.serving if each.copies.is_storing or each.copies.may_have_orders]
            )
        )
        self.check()
        assert_idle(self.scheduler)
        assert not self.live
        assert not any(world.engine.running for world in self.replicas.values() if world is not None)
        stats = self.scheduler.stats()
        self.counts["preemptions"] += stats.preemptions
        self.counts["moves"] += stats.moves

    def _servable(self) -> list[ClientView]:
        """Return the live requests that a serving replica could hold."""
        specs = [
            world.spec
            for replica, world in self.replicas.items()
            if world is not None and replica not in self.scheduler.draining
        ]

        def servable(request: Request) -> bool:
            longest = len(request.prompt) + request.max_new_tokens - 1
            return any(spec.fits(longest, request.adapter) for spec in specs)

        return [view for view in self.live.values() if servable(view.request)]

    def round(self) -> None:
        """Dispatch, and let each replica do a step, without delays."""
        self.dispatch()
        for replica in self.replicas:
            self.schedule(replica)
            self.orders_arrive(replica)
            self.step(replica)
            self.reports_arrive(replica)

    def _run_until_empty(self, left: Callable[[], Sized]) -> None:
        # Each token may take a step, and be computed again after a preemption: this bound is generous.
        work = sum(len(view.request.prompt) + view.request.max_new_tokens for view in self.live.values())
        rounds = iter(range(200 + 20 * work))
        while left():
            assert next(rounds, None) is not None, "a request starves"
            self.round()
