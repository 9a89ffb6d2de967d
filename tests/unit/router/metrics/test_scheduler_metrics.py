"""Metrics read from the scheduler: queue, slots, KV blocks, preemptions, cancellations, reasons for joining."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from metric_samples import exposition, samples
from prometheus_client.parser import text_string_to_metric_families

from text_generation_proto.cache_groups import CacheGroup
from text_generation_router.metrics import Metrics
from text_generation_router.metrics.instruments import Registry
from text_generation_router.metrics.scheduler import SchedulerMetrics
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.estimates import BUSY_MEMORY_S
from text_generation_router.scheduling.messages import JoinReason, ReplicaSpec, SchedulerOutput, StepOutput
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler


def a_scheduler(ratio: float = 0.0, batch: int = 8) -> Scheduler:
    scheduler = Scheduler(Policy(64, batch, ratio, max_waiting_tokens=3), replicas=2)
    scheduler.open(0, ReplicaSpec(num_slots=8, num_blocks=100, block_size=16))
    return scheduler


def submit(scheduler: Scheduler, *numbers: int) -> None:
    for number in numbers:
        scheduler.submit(Request(RequestId(number), (1, 2, 3, 4), max_new_tokens=10), 0.0)


def decided(scheduler: Scheduler) -> SchedulerOutput:
    scheduler.dispatch()
    orders = scheduler.schedule(0)
    assert orders is not None
    return orders


def scraped(scheduler: Scheduler) -> dict[str, float]:
    registry = Registry()
    registry.add(SchedulerMetrics, scheduler)
    return samples(registry)


def test_values_are_those_of_the_scheduler() -> None:
    scheduler = a_scheduler(batch=2)
    submit(scheduler, 1, 2, 3)
    decided(scheduler)
    used = round(100 * scheduler.stats().kv_usage)
    assert used > 0
    assert scraped(scheduler) == {
        "tgi_queue_size": 1,
        "tgi_batch_current_size": 2,
        "tgi_batch_current_max_tokens": 2 * (4 + 10),
        "tgi_batch_max_total_tokens": 1600,
        "tgi_batch_total_tokens": used * 16,
        "trtllm_num_requests_waiting": 1,
        "trtllm_num_requests_running": 2,
        "trtllm_kv_cache_utilization": used / 100,
        "trtllm_kv_cache_tokens_per_block": 16,
        "trtllm_kv_cache_max_blocks": 100,
        "text_generation_kv_cache_usage_ratio": used / 100,
        "text_generation_preemptions_total": 0,
        "text_generation_prefix_cache_queries_tokens_total": 2 * 4,
        "text_generation_prefix_cache_hits_tokens_total": 0,
        "text_generation_prefix_cache_blocks": 0,
        "text_generation_host_cache_blocks": 0,
        "text_generation_host_cache_used_blocks": 0,
        "text_generation_host_cache_stored_blocks_total": 0,
        "text_generation_host_cache_loaded_blocks_total": 0,
        "text_generation_host_cache_failed_blocks_total": 0,
        "text_generation_queued_tokens": 4 + 5,
        "text_generation_queue_seconds": 0,  # no throughput was measured yet
        "text_generation_busy_ratio": 0,
        "text_generation_requests_expired_total": 0,
        "text_generation_replicas": 2,
        "text_generation_replicas_serving": 1,
        "text_generation_request_moves_total": 0,
        "text_generation_sequences_cancelled_total": 0,
    }


def test_requests_of_each_adapter_that_a_replica_holds() -> None:
    scheduler = Scheduler(Policy(64, 2), replicas=2)
    for replica, adapters in enumerate((("sql", "a/b"), ("sql", "idle"))):
        scheduler.open(replica, ReplicaSpec(num_slots=2, num_blocks=100, block_size=16, adapters=adapters))
    for number, adapter in enumerate(("sql", "a/b", "", "a/b", "a/b", "")):
        scheduler.submit(Request(RequestId(number), (1, 2, 3, 4), max_new_tokens=10, adapter=adapter), 0.0)
    scheduler.dispatch()
    metrics = Metrics(max_input_tokens=1, max_total_tokens=2, scheduler=scheduler)
    metrics.add_names(("vllm",), "model")
    families = {family.name: family for family in text_string_to_metric_families(exposition(metrics.registry))}
    for state, counts in (("running", (1, 1, 0)), ("waiting", (0, 2, 0))):
        shown = families[f"text_generation_adapter_requests_{state}"].samples
        assert {sample.labels["adapter"]: sample.value for sample in shown} == dict(
            zip(("sql", "a/b", "idle"), counts, strict=True)
        )
    [info] = families["vllm:lora_requests_info"].samples
    labels = {"running_lora_adapters": "sql,a/b", "waiting_lora_adapters": "a/b", "max_lora": "3"}
    assert (info.labels, info.value) == (labels, pytest.approx(time.time_ns() / 1e9, abs=60))


def test_signals_for_autoscaling() -> None:
    """Queued work over throughput, also while every replica is lost; time in steps, less once replicas are idle."""
    scheduler = a_scheduler(batch=2)
    submit(scheduler, 1, 2, 3)
    orders = decided(scheduler)
    scheduler.update(0, StepOutput(orders.number, [0, 1], [], [7, 7], step_s=30.0), now=30.0)
    stats = scheduler.stats(now=30.0)
    assert stats.queue_seconds == pytest.approx(stats.queued_tokens / (2 / 30.0))
    # The step computed no prompt tokens, so it counts for the share of slots in use.
    assert stats.busy_ratio == pytest.approx(2 / 2 * (1 - math.exp(-30.0 / BUSY_MEMORY_S)))
    assert scheduler.stats(now=90.0).busy_ratio == pytest.approx(stats.busy_ratio * math.exp(-60.0 / BUSY_MEMORY_S))
    scheduler.open(1, ReplicaSpec(num_slots=8, num_blocks=100, block_size=16))
    both = scheduler.stats(now=30.0)
    half = a_scheduler(batch=4)
    submit(half, 1, 2)
    decoding = StepOutput(decided(half).number, [0, 1], [], [7, 7], step_s=30.0)
    half.update(0, decoding, now=30.0)
    assert half.stats(now=30.0).busy_ratio == pytest.approx(stats.busy_ratio / 2)
    half.update(0, replace(decoding, prefilled=[(0, 4)]), now=600.0)
    assert half.stats(now=600.0).busy_ratio == pytest.approx(stats.busy_ratio, rel=0.01)
    assert both.busy_ratio == pytest.approx(stats.busy_ratio / 2)
    assert both.queue_seconds == pytest.approx(stats.queue_seconds / 2)
    scheduler.lose(0)
    scheduler.lose(1)
    alone = scheduler.stats(now=30.0)
    assert (alone.queue_seconds, alone.busy_ratio) == (pytest.approx(alone.queued_tokens / (2 / 30.0)), 0.0)


@pytest.mark.parametrize(
    ("ratio", "waiting", "steps", "reason"),
    [
        (0.0, 1, 0, JoinReason.CHUNKING),
        (0.0, 1, 9, JoinReason.CHUNKING),
        (1.0, 2, 0, JoinReason.BACKPRESSURE),
        (1.0, 1, 3, JoinReason.WAIT_EXCEEDED),
    ],
)
def test_orders_give_the_reason_why_requests_join(ratio: float, waiting: int, steps: int, reason: JoinReason) -> None:
    scheduler = a_scheduler(ratio)
    submit(scheduler, 1, 2)
    first = decided(scheduler)
    assert first.join_reason is None  # nothing was running
    scheduler.update(0, StepOutput(first.number), 0.0)
    submit(scheduler, *range(3, 3 + waiting))
    for _ in range(steps):
        slots = [admission.slot for admission in first.placements]
        scheduler.update(0, StepOutput(first.number, slots, [], [7] * len(slots)), 0.0)
    assert decided(scheduler).join_reason is reason


def test_orders_without_new_requests_have_no_reason() -> None:
    scheduler = a_scheduler()
    submit(scheduler, 1)
    first = decided(scheduler)
    scheduler.update(0, StepOutput(first.number), 0.0)
    scheduler.cancel(RequestId(1))
    assert decided(scheduler).join_reason is None


def test_each_of_several_cache_groups_has_its_blocks() -> None:
    scheduler = a_scheduler(batch=2)
    assert not any("kv_blocks" in name for name in scraped(scheduler))
    scheduler.lose(0)
    groups = (CacheGroup(20, 128),)
    scheduler.open(0, ReplicaSpec(num_slots=8, num_blocks=100, block_size=16, further_groups=groups))
    submit(scheduler, 1)
    decided(scheduler)
    found = scraped(scheduler)
    assert [found[f'text_generation_kv_blocks{{group="{name}"}}'] for name in ("full", "window 128")] == [100, 20]
    used = [found[f'text_generation_kv_blocks_used{{group="{name}"}}'] for name in ("full", "window 128")]
    assert used == [1, 1]
    assert found["text_generation_kv_cache_usage_ratio"] == 1 / 20, "that of the fullest group"
