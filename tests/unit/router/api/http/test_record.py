"""A request leaves one log line; each of its generations is counted."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from structlog.testing import capture_logs

from text_generation_proto.values import FinishReason
from text_generation_router.api.http.record import GenerationRecord, Record, cached_tokens, finish
from text_generation_router.errors import DeadlineExceeded, GenerationFailed, InvalidRequest
from text_generation_router.generation import GenerationResult, GenerationTimes
from text_generation_router.metrics import Metrics
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler


@pytest.fixture
def metrics() -> Metrics:
    scheduler = Scheduler(Policy(1, 1))
    return Metrics(max_input_tokens=100, max_total_tokens=200, scheduler=scheduler)


def nonzero(metrics: Metrics) -> dict[str, float]:
    """tgi_request_count, _success, _failure and requests_finished_total, where not 0."""
    names = (
        "tgi_request_count",
        "tgi_request_success",
        "tgi_request_failure",
        "text_generation_requests_finished_total",
    )
    lines = (line.rsplit(" ", 1) for line in metrics.exposition().decode().splitlines() if line.startswith(names))
    return {name: float(value) for name, value in lines if value != "0"}


def a_post() -> web.Request:
    return make_mocked_request("POST", "/v1/completions")


def started(record: Record, metrics: Metrics, number: int) -> GenerationRecord:
    generation = record.start(metrics)
    generation.request = Request(RequestId(number), (1, 2, 3), 10)
    generation.follow(GenerationTimes(record.started + 1, record.started + 1 + number, cached_tokens=number))
    return generation


def test_each_generation_counts_and_the_log_has_one_line(metrics: Metrics) -> None:
    record = Record(http_request_id="theirs")
    for number, reason in ((1, FinishReason.LENGTH), (2, FinishReason.EOS_TOKEN), (3, FinishReason.LENGTH)):
        started(record, metrics, number).ending = GenerationResult(reason, "some text", 5)
    with capture_logs() as logs:
        finish(record, a_post(), 200, metrics)
    assert nonzero(metrics) == {
        "tgi_request_count": 3,
        "tgi_request_success": 3,
        'text_generation_requests_finished_total{reason="length"}': 2,
        'text_generation_requests_finished_total{reason="eos_token"}': 1,
    }
    [line] = logs
    assert line.pop("total_s") >= 0
    assert line == {
        "event": "request finished",
        "log_level": "info",
        "route": "/v1/completions",
        "status": 200,
        "http_request_id": "theirs",
        "generations": 3,
        "request_id": 1,
        "prompt_tokens": 9,
        "new_tokens": 15,
        "finish_reason": "length,eos_token",
        "queue_s": 3.0,
        "cached_tokens": 6,
    }


def test_a_generation_may_fail_alone(metrics: Metrics) -> None:
    record = Record()
    started(record, metrics, 1).ending = GenerationResult(FinishReason.LENGTH, "", 5)
    started(record, metrics, 2).failed(GenerationFailed("numerics"))
    with capture_logs() as logs:
        finish(record, a_post(), 200, metrics)
    assert nonzero(metrics) == {
        "tgi_request_count": 2,
        "tgi_request_success": 1,
        'tgi_request_failure{err="generation"}': 1,
        'text_generation_requests_finished_total{reason="length"}': 1,
        'text_generation_requests_finished_total{reason="error"}': 1,
    }
    assert logs[0]["error_type"] == "generation"


def test_an_expired_generation_is_neither_an_error_nor_cancelled(metrics: Metrics) -> None:
    record = Record()
    started(record, metrics, 1).failed(DeadlineExceeded("too late"))
    finish(record, a_post(), 200, metrics)
    assert nonzero(metrics) == {
        "tgi_request_count": 1,
        'tgi_request_failure{err="timeout"}': 1,
        'text_generation_requests_finished_total{reason="expired"}': 1,
    }


def test_cached_tokens_are_the_minimum_over_the_sequences(metrics: Metrics) -> None:
    generation = Record().start(metrics)
    assert generation.cached_tokens == 0
    for times in (
        GenerationTimes(1.0, 2.0, 16),
        GenerationTimes(1.0, 2.0, 4),
        GenerationTimes(1.0),
    ):  # the last one is still in the queue
        generation.follow(times)
    assert generation.cached_tokens == 4


def test_cached_tokens_of_several_choices_are_their_minimum(metrics: Metrics) -> None:
    record = Record()
    answers = [record.start(metrics) for _ in range(3)]
    assert cached_tokens(answers) == 0
    for answer, found in zip(answers, (32, 0, 32), strict=True):
        answer.follow(GenerationTimes(1.0, 2.0, found))
    assert cached_tokens(answers) == 0
    assert cached_tokens(answers[::2]) == 32


def test_the_error_of_a_request_fails_all_its_generations(metrics: Metrics) -> None:
    record = Record()
    started(record, metrics, 1).ending = GenerationResult(FinishReason.LENGTH, "", 5)
    started(record, metrics, 2)
    record.failed(InvalidRequest("no"))
    finish(record, a_post(), 422, metrics)
    assert nonzero(metrics) == {
        "tgi_request_count": 2,
        'tgi_request_failure{err="validation"}': 2,
        'text_generation_requests_finished_total{reason="refused"}': 2,
    }


def test_a_generation_without_an_end_counts_as_incomplete(metrics: Metrics) -> None:
    record = Record()
    started(record, metrics, 1)
    finish(record, a_post(), 200, metrics)
    assert nonzero(metrics)['tgi_request_failure{err="incomplete"}'] == 1


def test_a_request_without_generations_is_not_counted(metrics: Metrics) -> None:
    finish(Record(), a_post(), 200, metrics)
    assert nonzero(metrics) == {}


def test_the_first_token_of_several_sequences_counts_once(metrics: Metrics) -> None:
    record = Record()
    generation = record.start(metrics)
    first, second = GenerationTimes(queued=1.0), GenerationTimes(queued=2.0)
    for times in (first, second):
        generation.follow(times)
    for times in (second, first):
        assert times.on_first_token is not None
        times.on_first_token(record.started + 3)
    assert generation.times is first
    assert generation.first_token == record.started + 3
    lines = metrics.exposition().decode().splitlines()
    assert "text_generation_time_to_first_token_seconds_count 1.0" in lines
    assert "text_generation_time_to_first_token_seconds_sum 3.0" in lines
