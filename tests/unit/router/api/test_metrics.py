"""Metrics carry TGI's names, types and buckets."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from text_generation_router.metrics import Histogram, Metrics, Spent

NAMES = {
    "tgi_request_count": "counter",
    "tgi_request_success": "counter",
    "tgi_request_failure": "counter",
    "tgi_request_duration": "histogram",
    "tgi_request_validation_duration": "histogram",
    "tgi_request_queue_duration": "histogram",
    "tgi_request_inference_duration": "histogram",
    "tgi_request_mean_time_per_token_duration": "histogram",
    "tgi_request_generated_tokens": "histogram",
    "tgi_request_input_length": "histogram",
    "tgi_request_max_new_tokens": "histogram",
    "tgi_queue_size": "gauge",
    "tgi_batch_current_size": "gauge",
}


def some_metrics() -> Metrics:
    metrics = Metrics(max_input_tokens=100, max_total_tokens=200, queue_size=lambda: 3, batch_size=lambda: 2)
    metrics.request_started()
    metrics.request_started()
    metrics.request_succeeded(Spent(1.0, 0.1, 0.2, 0.7, 7))
    metrics.request_failed("validation")
    return metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """Read line by line: the library's parser puts `_total` where it finds a counter without."""
    lines = (line.rsplit(" ", 1) for line in metrics.exposition().decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_every_metric_has_its_name_and_type() -> None:
    families = text_string_to_metric_families(some_metrics().exposition().decode())
    assert {family.name: family.type for family in families} == NAMES


def test_counters_have_no_suffix() -> None:
    values = samples(some_metrics())
    assert values["tgi_request_count"] == 2
    assert values["tgi_request_success"] == 1
    assert values['tgi_request_failure{err="validation"}'] == 1


def test_gauges_are_read_when_scraped() -> None:
    values = samples(some_metrics())
    assert (values["tgi_queue_size"], values["tgi_batch_current_size"]) == (3, 2)


def test_time_per_token_is_inference_over_tokens() -> None:
    assert samples(some_metrics())["tgi_request_mean_time_per_token_duration_sum"] == 0.7 / 7


def test_a_histogram_is_cumulative_and_its_bounds_inclusive() -> None:
    histogram = Histogram("h", "", [1, 2, 3])
    for value in (1, 1.5, 2, 9):
        histogram.observe(value)
    assert [(s.labels.get("le"), s.value) for s in histogram.family().samples] == [
        ("1", 1.0),
        ("2", 3.0),
        ("3", 3.0),
        ("+Inf", 4.0),
        (None, 4.0),
        (None, 13.5),
    ]
