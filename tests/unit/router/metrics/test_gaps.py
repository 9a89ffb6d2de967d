"""Inter-token latency equals what each request saw, however it is counted."""

from __future__ import annotations

import random

import pytest

from text_generation_router.metrics.instruments import Histogram
from text_generation_router.metrics.steps import TOKEN_GAP_BUCKETS, TokenGaps
from text_generation_router.request import RequestId


def ids(*numbers: int) -> set[RequestId]:
    return {RequestId(number) for number in numbers}


@pytest.fixture
def histogram() -> Histogram:
    return Histogram("seconds", "", TOKEN_GAP_BUCKETS)


def count_and_sum(histogram: Histogram) -> tuple[float, float]:
    count, total = (float(line.rsplit(" ", 1)[1]) for line in histogram.text().splitlines()[-2:])
    return count, total


def test_a_request_left_out_of_steps_has_one_long_gap(histogram: Histogram) -> None:
    gaps = TokenGaps(histogram)
    for at, served in ((1.0, ids(1, 2)), (2.0, ids(1)), (3.0, ids(1)), (7.0, ids(1, 2))):
        gaps.step(at, served, ids(1, 2))
    assert count_and_sum(histogram) == (4, 1.0 + 1.0 + 4.0 + 6.0)


def test_gaps_are_exact_over_many_steps(histogram: Histogram) -> None:
    chance = random.Random(7)
    gaps, last, now = TokenGaps(histogram), dict[RequestId, float](), 0.0
    alive, count, total = ids(*range(8)), 0, 0.0
    for _ in range(500):
        now += chance.choice((0.25, 0.5, 4.0))
        served = {request_id for request_id in sorted(alive) if chance.random() < 0.8}
        if not served:
            continue
        for request_id in served & last.keys():
            count += 1
            total += now - last[request_id]
        last |= dict.fromkeys(served, now)
        ended = {request_id for request_id in sorted(served) if chance.random() < 0.02}
        alive = (alive - ended) | ids(*(request_id + 100 for request_id in ended))
        gaps.step(now, served, alive)
    assert count > 1000
    assert gaps.tracked <= len(alive), "requests that ended are forgotten"
    assert count_and_sum(histogram) == (count, total)
