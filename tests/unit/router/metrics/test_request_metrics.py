"""Each generation that starts is counted once at its end, with TGI's labels."""

from __future__ import annotations

import pytest
from metric_samples import samples

from text_generation_proto.values import FinishReason
from text_generation_router.errors import (
    BatchTooLarge,
    ClientLeft,
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    Overloaded,
    ServingError,
    SuffixNotSupported,
    TemplateError,
    ToolError,
    Unhealthy,
    error_classes,
)
from text_generation_router.metrics.instruments import Registry
from text_generation_router.metrics.requests import Latencies, RequestMetrics

LATENCIES = Latencies(total_s=1.0, validation_s=0.1, queue_s=0.2, inference_s=0.7, generated_tokens=7)
FINISHED = "text_generation_requests_finished_total"


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def metrics(registry: Registry) -> RequestMetrics:
    return RequestMetrics(registry, 100, 200)


def counted(values: dict[str, float], name: str) -> dict[str, float]:
    """Label value → count, where it is not 0."""
    return {key.split('"')[1]: value for key, value in values.items() if key.startswith(name + "{") and value}


@pytest.mark.parametrize(
    ("error", "label", "reason"),
    [
        (Overloaded, "overloaded", "refused"),
        (Draining, "overloaded", "refused"),
        (Unhealthy, "generation", "refused"),
        (InvalidRequest, "validation", "refused"),
        (TemplateError, "template", "refused"),
        (ToolError, "tool", "refused"),
        (BatchTooLarge, "validation", "refused"),
        (SuffixNotSupported, "validation", "refused"),
        (DeadlineExceeded, "timeout", "expired"),
        (GenerationFailed, "generation", "error"),
        (IncompleteGeneration, "incomplete", "error"),
        (ClientLeft, "dropped", "cancelled"),
    ],
)
def test_a_failure_counts_once_by_label_and_by_reason(
    registry: Registry, metrics: RequestMetrics, error: type[ServingError], label: str, reason: str
) -> None:
    metrics.started()
    metrics.failed(error)
    values = samples(registry)
    assert counted(values, "tgi_request_failure") == {label: 1}
    assert counted(values, FINISHED) == {reason: 1}
    assert values["text_generation_requests_cancelled_total"] == (reason == "cancelled")


def test_no_error_adds_a_series(registry: Registry, metrics: RequestMetrics) -> None:
    before = samples(registry).keys()
    for error in error_classes():
        metrics.failed(error)
    assert samples(registry).keys() == before


def test_success_is_counted_with_its_latencies(registry: Registry, metrics: RequestMetrics) -> None:
    metrics.started()
    metrics.succeeded(LATENCIES, FinishReason.EOS_TOKEN)
    values = samples(registry)
    assert values["tgi_request_count"] == values["tgi_request_success"] == 1
    assert counted(values, FINISHED) == {"eos_token": 1}
    for part, seconds in (("", 1.0), ("_validation", 0.1), ("_queue", 0.2), ("_inference", 0.7)):
        assert values[f"tgi_request{part}_duration_sum"] == seconds
    assert values["tgi_request_mean_time_per_token_duration_sum"] == 0.7 / 7
    assert values["tgi_request_generated_tokens_sum"] == 7
