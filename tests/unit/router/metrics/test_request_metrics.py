"""Each generation that started ends as one thing, under TGI's words."""

from __future__ import annotations

import pytest

from text_generation_proto.values import FinishReason
from text_generation_router import errors
from text_generation_router.metrics.requests import CANCELLED, FAILURES, RequestMetrics, Spent

SPENT = Spent(total_s=1.0, validation_s=0.1, queue_s=0.2, inference_s=0.7, generated_tokens=7)


def samples(metrics: RequestMetrics) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for one in metrics.instruments() for line in one.lines() if line[0] != "#")
    return {name: float(value) for name, value in lines}


def sum_of(values: dict[str, float], name: str) -> float:
    return sum(value for key, value in values.items() if key.startswith(name + "{"))


BEFORE_A_GENERATION = {"unauthorized", "not_found", "utf8", "length mismatch", "Input validation error"}
"""Told before a generation was asked for, or where none is."""


def test_every_error_that_a_generation_can_end_with_has_its_words() -> None:
    kinds = {
        vars(kind)["error_type"] for kind in vars(errors).values() if "error_type" in getattr(kind, "__dict__", ())
    }
    assert kinds >= BEFORE_A_GENERATION
    assert kinds - BEFORE_A_GENERATION == FAILURES.keys() - {"dropped"}


def test_tgis_words_are_the_labels() -> None:
    values = samples(RequestMetrics(100, 200))
    for word in ("overloaded", "validation", "incomplete", "template", "generation", "dropped"):
        assert values[f'tgi_request_failure{{err="{word}"}}'] == 0


@pytest.mark.parametrize("error_type", sorted(FAILURES))
def test_a_failure_counts_once_under_each_name(error_type: str) -> None:
    metrics = RequestMetrics(100, 200)
    metrics.started()
    metrics.failed(error_type)
    values = samples(metrics)
    err, reason = FAILURES[error_type]
    assert values[f'tgi_request_failure{{err="{err}"}}'] == 1 == sum_of(values, "tgi_request_failure")
    finished = "text_generation_requests_finished_total"
    assert values[f'{finished}{{reason="{reason}"}}'] == 1 == sum_of(values, finished)
    assert values["text_generation_requests_cancelled_total"] == (reason == CANCELLED)


def test_a_word_nobody_knows_makes_no_new_series() -> None:
    metrics = RequestMetrics(100, 200)
    before = samples(metrics).keys()
    metrics.failed("a word from nowhere")
    assert samples(metrics).keys() == before
    assert samples(metrics)['tgi_request_failure{err="incomplete"}'] == 1


def test_success_says_where_the_time_went() -> None:
    metrics = RequestMetrics(100, 200)
    metrics.started()
    metrics.succeeded(SPENT, FinishReason.EOS_TOKEN)
    values = samples(metrics)
    assert values["tgi_request_count"] == values["tgi_request_success"] == 1
    assert values['text_generation_requests_finished_total{reason="eos_token"}'] == 1
    for part, seconds in (("", 1.0), ("_validation", 0.1), ("_queue", 0.2), ("_inference", 0.7)):
        assert values[f"tgi_request{part}_duration_sum"] == seconds
    assert values["tgi_request_mean_time_per_token_duration_sum"] == 0.7 / 7
    assert values["tgi_request_generated_tokens_sum"] == 7
