"""Replays: beside the queue, of no account, and gone when they lose their room."""

from __future__ import annotations

import pytest
from scheduler_checks import check_scheduler
from scheduler_rig import a_policy, words

from text_generation_proto.values import FinishReason, LogprobOptions
from text_generation_router.request import Priority, QualityOfService, Request, RequestId
from text_generation_router.scheduling.messages import ReplicaSpec, StepOutput
from text_generation_router.scheduling.scheduler import Scheduler

BLOCK = 4
PROMPT = words(1, 20)


def scheduler(replicas: int = 1, blocks: int = 40, **policy: object) -> Scheduler:
    it = Scheduler(a_policy(**policy), replicas)
    for number in range(replicas):
        it.open(number, ReplicaSpec(4, blocks, BLOCK))
    return it


def replay(number: int = -1, prompt: tuple[int, ...] = PROMPT) -> Request:
    qos, logprobs = QualityOfService(priority=Priority.BULK), LogprobOptions(generated=True)
    cold = frozenset({"prefix"})
    return Request(RequestId(number), prompt, 1, logprobs=logprobs, qos=qos, replayed=len(prompt) // 2, without=cold)


def test_a_replay_takes_another_replica_than_the_one_that_served() -> None:
    it = scheduler(3)
    assert it.replays.start(replay(), 0) == 1
    assert it.replays.start(replay(-2), 0) is None
    it.replays.cancel()
    it.drain(1)
    it.drain(2)
    assert it.replays.start(replay(), 0) == 0
    it = scheduler(2)
    it.drain(0)
    assert it.replays.start(replay(), 1) == 1


def test_a_replay_counts_for_nobody_and_leaves_no_prefix() -> None:
    it = scheduler(max_batch_prefill_tokens=64)
    before = it.stats(0.0)
    assert it.replays.start(replay(), 0) == 0
    orders = it.schedule(0)
    assert orders is not None
    (placement,) = orders.placements
    assert (placement.cached_tokens, placement.request.replayed) == (0, 10)
    slot = placement.slot
    check_scheduler(it)
    assert not it.requests
    done = StepOutput(
        1, [slot], token_ids=[7], finished={slot: FinishReason.LENGTH}, prefilled=[(slot, 20)], step_s=0.5
    )
    deliveries = it.update(0, done, 1.0)
    assert not deliveries.tokens
    assert it.replays.running is None
    after = it.stats(1.0)
    assert (after.busy_ratio, after.cached_blocks, after.prompt_tokens) == (0.0, 0, 0)
    assert (after.running, after.kv_usage) == (before.running, before.kv_usage)
    check_scheduler(it)


def test_a_replay_reuses_no_prefix_and_no_request_waits_for_its_own() -> None:
    it = scheduler(max_batch_prefill_tokens=16)
    it.submit(Request(RequestId(1), PROMPT, 4), 0.0)
    it.dispatch()
    orders = it.schedule(0)
    assert orders is not None
    slot = orders.placements[0].slot
    it.update(0, StepOutput(1, prefilled=[(slot, 16)]), 0.1)
    assert it.stats().cached_blocks == 4
    it.replays.start(replay(), 0)
    orders = it.schedule(0)
    assert orders is not None
    assert orders.placements[0].cached_tokens == 0
    it.submit(Request(RequestId(2), PROMPT, 4), 0.2)
    assert it.dispatch() == [0]


@pytest.mark.parametrize("sent", [False, True])
def test_a_cancelled_replay_frees_its_room(sent: bool) -> None:
    it = scheduler()
    it.replays.start(replay(), 0)
    if sent:
        it.schedule(0)
    assert it.replays.cancel() == 0
    assert it.replays.cancel() is None
    if sent:
        it.update(0, StepOutput(1), 0.1)
        assert it.replays.start(replay(-2), 0) is None
        assert it.schedule(0) is not None
        it.update(0, StepOutput(2), 0.2)
    check_scheduler(it)
    assert it.stats().kv_usage == 0
    assert it.replays.start(replay(-2), 0) == 0


def test_a_replay_ends_with_its_replica_and_is_not_requeued() -> None:
    it = scheduler()
    it.replays.start(replay(), 0)
    it.schedule(0)
    deliveries = it.lose(0)
    assert (deliveries.moved, deliveries.failed, len(it.queue), it.replays.running) == ([], [], 0, None)
    assert it.stats().moves == 0


def test_a_replay_is_the_first_to_be_preempted_and_is_not_requeued() -> None:
    it = scheduler(blocks=11, max_batch_prefill_tokens=64, growth_tokens=4)
    it.submit(Request(RequestId(1), words(2, 8), 36, qos=QualityOfService(priority=Priority.BULK)), 0.0)
    it.dispatch()
    it.schedule(0)
    it.replays.start(replay(), 0)
    it.update(0, StepOutput(1, [0], token_ids=[1], prefilled=[(0, 8)]), 0.1)
    number, applied = 1, False
    for _ in range(30):
        if (orders := it.schedule(0)) is not None:
            number, applied = orders.number, True
        deliveries = it.update(0, StepOutput(number, [0], token_ids=[1]), 0.2)
        assert len(deliveries.tokens) == 1
        if it.replays.running is None:
            break
    assert applied
    assert it.replays.running is None
    assert it.stats().preemptions == 0
    assert len(it.queue) == 0
    check_scheduler(it)


def test_a_replay_computes_few_tokens_at_once() -> None:
    it = scheduler(blocks=400, max_batch_prefill_tokens=4096)
    it.replays.start(replay(prompt=words(1, 1200)), 0)
    chunks: list[int] = []
    while orders := it.schedule(0):
        chunks += [tokens for _, tokens in orders.prefill]
        it.update(0, StepOutput(orders.number, prefilled=orders.prefill), 0.1)
    assert chunks == [512, 512, 176]
