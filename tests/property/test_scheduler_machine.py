"""The scheduler as a state machine, against the real bookkeeping of a shard (the echo engine, driven step by step).

Whatever clients do and however the two race: no step is over budget, no block has two owners, each request ends exactly
once, nothing follows its end, its tokens are right, and at the end nothing is left behind.
"""

from __future__ import annotations

import random
from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from text_generation_router.request import FinishReason, Request, RequestId
from text_generation_router.scheduling.blocks import BlockPool
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.steps import FailureKind, Orders, Outcome
from text_generation_shard import engine as shard
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.echo import EchoEngine

FAILING_TOKEN = 9
BLOCK_SIZE = 16


class SchedulerMachine(RuleBasedStateMachine):
    """Clients, the scheduler, the wire (orders and reports on their way) and a shard."""

    @initialize(
        blocks=st.integers(6, 24),
        slots=st.integers(1, 6),
        budget=st.integers(1, 64),
        batch=st.integers(1, 6),
        ratio=st.sampled_from([0.0, 0.3, 1.2]),
        patience=st.integers(0, 5),
        seed=st.integers(0, 1000),
    )
    def start(self, blocks: int, slots: int, budget: int, batch: int, ratio: float, patience: int, seed: int) -> None:
        self.seed = seed
        self.budget, self.batch = budget, batch
        self.scheduler = Scheduler(BlockPool(blocks, BLOCK_SIZE), slots, Policy(budget, batch, ratio, patience))
        self.engine = EchoEngine.build(ShardConfig(max_batch_size=slots, echo_fail_token=FAILING_TOKEN))
        self.engine.warm_up(shard.WarmUpLimits(max_batch_total_tokens=blocks * BLOCK_SIZE))
        self.orders: deque[Orders] = deque()
        self.inbox: deque[Orders] = deque()
        self.reports: deque[Outcome] = deque()
        self.applied = 0
        self.requests: dict[RequestId, Request] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, str] = {}
        self.cancelled: set[RequestId] = set()

    @rule(length=st.integers(1, 90), new=st.integers(1, 200), fails=st.sampled_from([False] * 5 + [True]))
    def submit(self, length: int, new: int, fails: bool) -> None:
        if not self.scheduler.fits(length, new):
            return
        request_id = RequestId(len(self.requests))
        prompt = tuple(10 + (request_id * 7 + i) % 50 for i in range(length - fails)) + (
            (FAILING_TOKEN,) if fails else ()
        )
        request = Request(request_id, prompt, new)
        self.requests[request_id] = request
        self.tokens[request_id] = []
        self.scheduler.submit(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.cancel(request_id)
        if request_id not in self.ended:
            self.cancelled.add(request_id)

    @rule(script=st.lists(st.sampled_from("ddoossr"), min_size=5, max_size=60))
    def race(self, script: list[str]) -> None:
        self.go_on(script)

    def go_on(self, script: list[str]) -> None:
        """Router and shard, each at its own pace."""
        for move in script:
            {"d": self.decide, "o": self.orders_arrive, "s": self.boundary_and_step, "r": self.report_arrives}[move]()

    def decide(self) -> None:
        orders = self.scheduler.decide()
        if orders is None:
            return
        assert sum(tokens for _, tokens in orders.prefill) <= self.budget
        assert all(tokens > 0 for _, tokens in orders.prefill)
        self.orders.append(orders)

    def orders_arrive(self) -> None:
        self.inbox += self.orders
        self.orders.clear()

    def boundary_and_step(self) -> None:
        """The shard: at most one set of orders, then one step."""
        result = shard.StepResult()
        if self.inbox:
            orders = self.inbox.popleft()
            result.failed += self.engine.apply(_for_shard(orders))
            assert not result.failed, "the scheduler kept the contract"
            assert self.engine.running <= self.batch + len(self.cancelled)
            self.applied = orders.number
        self.reports.append(self._outcome(result))
        if (step := self.engine.step()) is not None:
            self.reports.append(self._outcome(step))

    def report_arrives(self) -> None:
        while self.reports:
            self._record(self.reports.popleft())

    def _record(self, outcome: Outcome) -> None:
        deliveries = self.scheduler.apply(outcome)
        for request_id, first, end, reason in deliveries.tokens:
            self._open(request_id)
            self.tokens[request_id] += outcome.token_ids[first:end]
            if reason is not None:
                assert reason is FinishReason.LENGTH
                self.ended[request_id] = "finished"
        for failed in deliveries.failed:
            self._open(failed.request_id)
            assert failed.kind is FailureKind.NUMERICS
            self.ended[failed.request_id] = "failed"

    def _open(self, request_id: RequestId) -> None:
        assert request_id not in self.ended, "nothing after the end"
        assert request_id not in self.cancelled, "nothing after a cancel"

    def _outcome(self, step: shard.StepResult) -> Outcome:
        return Outcome(
            orders_applied=self.applied,
            slots=step.slots,
            token_counts=step.token_counts,
            token_ids=step.token_ids,
            finished={slot: FinishReason(reason.value) for slot, reason in step.finished},
            failed={failure.slot: (FailureKind(failure.code.value), failure.message) for failure in step.failed},
        )

    @invariant()
    def blocks_have_one_owner(self) -> None:
        if hasattr(self, "engine"):
            held = [block for sequence in self.engine._table._sequences.values() for block in sequence.blocks]
            assert len(held) == len(set(held))
            for sequence in self.engine._table._sequences.values():
                assert sequence.computed <= len(sequence.blocks) * BLOCK_SIZE

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        race = random.Random(self.seed)
        for _ in range(100_000):
            if not (self.scheduler.requests or self.orders or self.inbox or self.reports):
                break
            self.go_on([race.choice("ddoossr")])
        assert not self.scheduler.requests, "everything ends"
        assert (self.scheduler.waiting, self.scheduler.running, self.scheduler.used_blocks) == (0, 0, 0)
        assert self.engine.running == 0
        for request_id, request in self.requests.items():
            period = len(request.prompt)
            expected = [request.prompt[i % period] for i in range(request.max_new_tokens)]
            got = self.tokens[request_id]
            if request_id in self.cancelled:
                assert request_id not in self.ended
            elif self.ended[request_id] == "finished":
                assert got == expected
            else:
                assert got == expected[: expected.index(FAILING_TOKEN)]


def _for_shard(orders: Orders) -> shard.Orders:
    return shard.Orders(
        number=orders.number,
        release=orders.release,
        admit=tuple(
            shard.Admission(
                slot=admission.slot,
                prompt=admission.request.prompt + admission.generated,
                generated_tokens=len(admission.generated),
                blocks=admission.blocks,
                stopping=shard.Stopping(admission.request.max_new_tokens - len(admission.generated)),
            )
            for admission in orders.admit
        ),
        grants=orders.grants,
        prefill=orders.prefill,
    )


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
