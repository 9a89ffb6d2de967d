"""Inter-token latency equals what each request saw, however it is counted."""

from __future__ import annotations

import random

import pytest

from text_generation_router.metrics.instruments import Histogram
from text_generation_router.metrics.steps import MIN_SWEEP, TOKEN_GAP_BUCKETS, TokenGaps
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
        gaps.step(0, at, served, ids(1, 2))
    assert count_and_sum(histogram) == (4, 1.0 + 1.0 + 4.0 + 6.0)


def test_gaps_are_exact_over_steps_losses_and_moves_of_several_replicas(histogram: Histogram) -> None:
    chance = random.Random(7)
    gaps, last, now = TokenGaps(histogram), dict[RequestId, float](), 0.0
    replica_of = {request_id: request_id % 3 for request_id in ids(*range(12))}
    count, total = 0, 0.0
    for step in range(3000):
        now += chance.choice((0.25, 0.5, 4.0))
        replica = chance.randrange(3)
        own = sorted(request_id for request_id in replica_of if replica_of[request_id] == replica)
        if step % 50 == 0:
            gaps.lost(replica)
            replica_of |= {request_id: chance.randrange(3) for request_id in own}
            continue
        if own and step % 7 == 0:  # preempted, and placed somewhere
            gaps.leave_out(own[0])
            replica_of[own[0]] = chance.randrange(3)
            continue
        served = {request_id for request_id in own if chance.random() < 0.8}
        for request_id in served & last.keys():
            count += 1
            total += now - last[request_id]
        last |= dict.fromkeys(served, now)
        for request_id in [each for each in sorted(served) if chance.random() < 0.02]:
            replica_of[RequestId(request_id + 100)] = replica_of.pop(request_id)
        gaps.step(replica, now, served, replica_of)
    assert count > 5000
    assert count_and_sum(histogram) == (count, total)


def test_requests_that_end_while_they_wait_are_forgotten(histogram: Histogram) -> None:
    gaps, alive = TokenGaps(histogram), ids(1)
    for number in range(10 * MIN_SWEEP):
        gaps.step(0, float(number), ids(1) if number % 2 else ids(number + 2), alive | ids(number + 2))
        gaps.lost(0)
    assert len(gaps.left_out) <= MIN_SWEEP + 1
