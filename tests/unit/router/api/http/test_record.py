"""A request leaves one log line; each of its generations is counted."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from api_settings import api_metrics
from metric_samples import exposition
from structlog.testing import capture_logs

from text_generation_proto.values import FinishReason
from text_generation_router.api.http.record import GenerationRecord, Record, cached_tokens, finish
from text_generation_router.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, ServingError
from text_generation_router.generation import GenerationResult, GenerationTimes
from text_generation_router.metrics import Metrics
from text_generation_router.request import Request, RequestId
from text_generation_router.web.refusals import RefusalLimiter

Json = dict[str, float]


metrics = pytest.fixture(api_metrics)


def nonzero(metrics: Metrics) -> dict[str, float]:
    """tgi_request_count, _success, _failure and requests_finished_total, where not 0."""
    names = (
        "tgi_request_count",
        "tgi_request_success",
        "tgi_request_failure",
        "text_generation_requests_finished_total",
    )
    lines = (line.rsplit(" ", 1) for line in exposition(metrics.registry).splitlines() if line.startswith(names))
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
        finish(record, a_post(), 200, metrics, RefusalLimiter())
    assert nonzero(metrics) == {
        "tgi_request_count": 3,
        "tgi_request_success": 3,
        'text_generation_requests_finished_total{reason="length"}': 2,
        'text_generation_requests_finished_total{reason="eos_token"}': 1,
    }
    [line] = logs
    assert [*line][:3] == ["route", "status", "total_s"]
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


LENGTH = GenerationResult(FinishReason.LENGTH, "", 5)


@pytest.mark.parametrize(
    ("ends", "error", "counts"),
    [
        ((LENGTH, GenerationFailed("no")), None, {"success": 1, "generation": 1, "length": 1, "error": 1}),
        ((DeadlineExceeded("too late"),), None, {"timeout": 1, "expired": 1}),
        ((LENGTH, None), InvalidRequest("no"), {"validation": 2, "refused": 2}),
        ((None,), None, {"incomplete": 1, "error": 1}),
        ((), None, {}),
    ],
    ids=["one fails alone", "expired", "the error of the request fails all", "no end", "no generations"],
)
def test_each_generation_has_one_end(
    metrics: Metrics, ends: tuple[GenerationResult | ServingError | None, ...], error: ServingError | None, counts: Json
) -> None:
    record = Record()
    for number, end in enumerate(ends):
        generation = started(record, metrics, number)
        if isinstance(end, GenerationResult):
            generation.ending = end
        elif end is not None:
            generation.failed(end)
    if error is not None:
        record.failed(error)
    with capture_logs() as logs:
        finish(record, a_post(), 200, metrics, RefusalLimiter())
    values = nonzero(metrics)
    assert values.pop("tgi_request_count", 0) == len(ends)
    assert {name.split('"')[1] if '"' in name else "success": value for name, value in values.items()} == counts
    errors = [failed.error_type for failed in (*ends, error) if isinstance(failed, ServingError)]
    assert logs[0].get("error_type") == (errors[0] if errors else None)


def test_cached_tokens_are_the_minimum_over_sequences_and_choices(metrics: Metrics) -> None:
    record = Record()
    first, second = record.start(metrics), record.start(metrics)
    assert cached_tokens([first, second]) == first.cached_tokens == 0
    for times in (GenerationTimes(1.0, 2.0, 16), GenerationTimes(1.0, 2.0, 4), GenerationTimes(1.0)):
        first.follow(times)
    assert first.cached_tokens == cached_tokens([first]) == 4
    second.follow(GenerationTimes(1.0, 2.0, 32))
    assert cached_tokens([first, second]) == cached_tokens([second, first]) == 4
    second.follow(GenerationTimes(1.0, 2.0, 0))
    assert cached_tokens([first, second]) == 0


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
    lines = exposition(metrics.registry).splitlines()
    assert "text_generation_time_to_first_token_seconds_count 1.0" in lines
    assert "text_generation_time_to_first_token_seconds_sum 3.0" in lines
