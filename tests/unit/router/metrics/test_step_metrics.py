"""Metrics derived from step reports and orders."""

from __future__ import annotations

import pytest
from metric_samples import samples

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.metrics.instruments import Registry
from text_generation_router.metrics.steps import StepMetrics
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.messages import Deliveries, JoinReason, Placement, SchedulerOutput
from text_generation_router.shards.observer import StepRecord


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def metrics(registry: Registry) -> StepMetrics:
    return StepMetrics(registry)


def handled(report: pb.StepReport, tokens: dict[int, int] | None = None, steps: int = 1) -> StepRecord:
    """`report`, delivered; `tokens`: number of new tokens by request."""
    deliveries, first = Deliveries(), 0
    for number, count in (tokens or {}).items():
        deliveries.tokens.append((RequestId(number), first, first + count, None))
        first += count
    return StepRecord(
        0,
        report,
        steps,
        deliveries,
        received=1.0,
        update_s=0.25,
        deliver_s=0.5,
        alive={RequestId(number) for number in (1, 2, 3)},
    )


def orders(admitted: int, joined: JoinReason | None) -> SchedulerOutput:
    admit = (Placement(0, Request(RequestId(1), (1,), 1), (), ()),) * admitted
    return SchedulerOutput(1, placements=admit, join_reason=joined)


def test_a_step_that_computes_prompt_tokens_is_prefill_and_any_other_decode(
    registry: Registry, metrics: StepMetrics
) -> None:
    metrics.on_report(
        handled(
            pb.StepReport(
                step=1, step_ns=4_000_000_000, forward_ns=3_000_000_000, prefilled_slots=[0], prefilled_tokens=[9]
            )
        )
    )
    for step in (2, 3):
        metrics.on_report(handled(pb.StepReport(step=step, step_ns=2_000_000_000, forward_ns=1_000_000_000)))
    values = samples(registry)
    for method, count, seconds, forward in (("prefill", 1, 4.0, 3.0), ("decode", 2, 4.0, 2.0)):
        label = f'{{method="{method}"}}'
        assert values[f"tgi_batch_inference_count{label}"] == values[f"tgi_batch_inference_success{label}"] == count
        assert values[f"tgi_batch_inference_duration_sum{label}"] == seconds
        assert values[f"tgi_batch_forward_duration_sum{label}"] == forward
        assert values[f"tgi_batch_filter_duration_sum{label}"] == 0.25 * count
        assert values[f"tgi_batch_decode_duration_sum{label}"] == 0.5 * count
    assert values["text_generation_prompt_tokens_total"] == 9


def test_each_step_of_a_report_counts_and_a_report_without_steps_does_not(
    registry: Registry, metrics: StepMetrics
) -> None:
    metrics.on_report(handled(pb.StepReport(step=4, step_ns=8_000_000_000, forward_ns=4_000_000_000), steps=4))
    metrics.on_report(handled(pb.StepReport(step=4, step_ns=1), steps=0))
    values = samples(registry)
    assert values['tgi_batch_inference_count{method="decode"}'] == 4
    assert values['tgi_batch_inference_duration_count{method="decode"}'] == 4
    assert values['tgi_batch_inference_duration_sum{method="decode"}'] == 8.0


def test_a_step_that_failed_is_a_failure_and_a_sequence_that_failed_is_not(
    registry: Registry, metrics: StepMetrics
) -> None:
    numerics = pb.Failure(slot=0, code=pb.FAILURE_CODE_NUMERICS)
    whole = pb.Failure(slot=0, code=pb.FAILURE_CODE_STEP)
    metrics.on_report(handled(pb.StepReport(step=1, step_ns=1, failed=[numerics])))
    metrics.on_report(handled(pb.StepReport(step=2, failed=[whole])))
    values = samples(registry)
    assert values['tgi_batch_inference_count{method="decode"}'] == 2
    assert values['tgi_batch_inference_success{method="decode"}'] == 1
    assert values['tgi_batch_inference_failure{method="decode"}'] == 1
    assert values['tgi_batch_inference_duration_count{method="decode"}'] == 1


def test_tokens_beyond_the_first_of_a_step_are_skipped_steps(registry: Registry, metrics: StepMetrics) -> None:
    metrics.on_report(handled(pb.StepReport(step=1, step_ns=1), {1: 1, 2: 1}))
    metrics.on_report(handled(pb.StepReport(step=2, step_ns=1, token_counts=[1, 4]), {1: 1, 3: 4}))
    values = samples(registry)
    assert values["text_generation_generated_tokens_total"] == 7
    assert values["tgi_request_skipped_tokens_count"] == 4
    assert values["tgi_request_skipped_tokens_sum"] == 3
    # One gap of request 1 between two steps, three of request 3 within one step.
    assert values["text_generation_inter_token_seconds_count"] == 1 + 3


def test_joins_are_counted_by_reason(registry: Registry, metrics: StepMetrics) -> None:
    metrics.on_orders(orders(0, None), 9.0)
    metrics.on_orders(orders(3, None), 9.0)
    for reason in JoinReason:
        metrics.on_orders(orders(2, reason), 0.5)
    values = samples(registry)
    assert (values["tgi_batch_next_size_count"], values["tgi_batch_next_size_sum"]) == (4, 9)
    for word in ("backpressure", "wait_exceeded", "chunking"):
        assert values[f'tgi_batch_concat{{reason="{word}"}}'] == 1
    assert values['tgi_batch_concat_duration_sum{method="decode"}'] == 1.5


def test_engine_queues_are_summed_until_a_replica_is_lost(registry: Registry, metrics: StepMetrics) -> None:
    name = "text_generation_engine_queued_requests"
    assert samples(registry)[name] == 0
    metrics.on_report(handled(pb.StepReport(queued=3)))
    metrics.on_report(handled(pb.StepReport(queued=5))._replace(replica=1))
    assert samples(registry)[name] == 8
    metrics.on_report(handled(pb.StepReport(queued=1), steps=0))
    assert samples(registry)[name] == 6
    metrics.on_loss(1)
    metrics.on_loss(1)
    assert samples(registry)[name] == 1


def test_the_figures_of_speculative_decoding(registry: Registry, metrics: StepMetrics) -> None:
    for _ in range(2):
        metrics.on_report(
            handled(
                pb.StepReport(
                    step=1,
                    drafting=[
                        pb.Drafting(drafts=2, draft_tokens=6, accepted_tokens=5, source="own"),
                        pb.Drafting(drafts=1, draft_tokens=2, source="prediction"),
                        pb.Drafting(drafts=1, draft_tokens=3, accepted_tokens=1),
                        pb.Drafting(drafts=1, draft_tokens=1, accepted_tokens=1, source="of a later version"),
                    ],
                )
            )
        )
    found = samples(registry)
    names = [f"text_generation_spec_decode_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    by_source = {
        source: [found[f'{name}{{source="{source}"}}'] for name in names]
        for source in ("own", "recent", "prediction", "synthetic", "engine")
    }
    assert by_source == {
        "own": [4, 12, 10], "recent": [0, 0, 0], "prediction": [2, 4, 0], "synthetic": [0, 0, 0], "engine": [4, 8, 4],
    }  # fmt: skip


def test_a_replica_that_is_lost_has_no_gpus(registry: Registry, metrics: StepMetrics) -> None:
    series = 'text_generation_gpu_power_watts{replica="0",gpu="2",uuid="GPU-2"}'
    metrics.on_report(handled(pb.StepReport(gpus=[pb.GpuState(index=2, uuid="GPU-2", power_watts=7.5)]), steps=0))
    metrics.on_report(handled(pb.StepReport(step=1)))
    assert samples(registry)[series] == 7.5
    metrics.on_loss(0)
    assert series not in samples(registry)
