"""Throughput of a replica from its step reports, and the estimated wait."""

from __future__ import annotations

import math

import pytest

from text_generation_router.scheduling.estimates import Throughput, estimate_wait


def work(
    throughput: Throughput, now: float, seconds: float, rate: float, *, gap_s: float = 0.0, queued: bool = True
) -> float:
    """Record steps of 50 ms, separated by `gap_s`, for `seconds`. Return the time of the end."""
    end = now + seconds
    while now < end:
        now += gap_s + 0.05
        throughput.record(now, round(rate * 0.05), 0.05, queued=queued)
    return now


def test_small_gaps_between_steps_count() -> None:
    throughput = Throughput()
    work(throughput, 0.0, 60.0, 1_000, gap_s=0.05)
    assert throughput.rate() == pytest.approx(500.0, rel=0.01)


def test_busy_ratio_is_the_share_of_time_in_steps() -> None:
    throughput = Throughput()
    now = work(throughput, 0.0, 600.0, 1_000, gap_s=0.05)
    assert throughput.busy_ratio(now) == pytest.approx(0.5, rel=0.01)
    for _ in range(100):  # three reports at once, of steps one after the other
        now += 0.75
        for _ in range(3):
            throughput.record(now, 100, 0.25)
    assert 0.7 < throughput.busy_ratio(now) <= 1.0
    assert throughput.busy_ratio(now + 600.0) < 0.001


def test_idle_time_does_not_count() -> None:
    throughput = Throughput()
    now = 0.0
    for _ in range(20):
        now = work(throughput, now, 1.0, 1_000) + 3.0
    assert throughput.rate() == pytest.approx(1_000.0, rel=0.01)


def test_after_idle_time_new_steps_soon_count_most() -> None:
    throughput = Throughput()
    now = work(throughput, 0.0, 60.0, 1_000)
    now = work(throughput, now + 3_600.0, 5.0, 200)
    assert 200 <= throughput.rate() < 400


def test_a_change_is_followed_with_a_time_constant_of_twenty_seconds() -> None:
    throughput = Throughput()
    now = work(throughput, 0.0, 200.0, 1_000)
    now = work(throughput, now, 20.0, 500)
    assert throughput.rate() == pytest.approx(500 + 500 / math.e, rel=0.02)
    now = work(throughput, now, 80.0, 500)
    assert throughput.rate() == pytest.approx(500, rel=0.03)


def test_the_rate_is_total_tokens_over_total_seconds() -> None:
    """A wait passes through short and long steps: the sum of their seconds counts."""
    throughput = Throughput()
    now = 0.0
    for _ in range(200):
        now += 0.9
        throughput.record(now, 90, 0.9)
        now += 0.1
        throughput.record(now, 410, 0.1)
    assert throughput.rate() == pytest.approx(500.0, rel=0.02)


def test_reports_that_come_in_a_bunch_count_the_wall_clock_once() -> None:
    throughput = Throughput()
    now = 0.0
    for _ in range(200):
        now += 0.2
        for _ in range(4):
            throughput.record(now, 50, 0.05)
    assert throughput.rate() == pytest.approx(1_000.0, rel=0.03)


def test_the_rate_under_load_replaces_the_rate_with_spare_room() -> None:
    throughput = Throughput()
    now = work(throughput, 0.0, 60.0, 100, queued=False)
    assert throughput.rate() == pytest.approx(100.0)
    now = work(throughput, now, 1.0, 1_000)
    assert throughput.rate() == pytest.approx(1_000.0)
    now = work(throughput, now, 600.0, 100, queued=False)
    assert throughput.rate() == pytest.approx(1_000.0)


@pytest.mark.parametrize(
    ("work_ahead", "rates", "wait"),
    [
        (1_000.0, [], None),
        (1_000.0, [0.0, 0.0], None),
        (1_000.0, [100.0], 10.0),
        (1_000.0, [100.0, 300.0], 2.5),
        (1_000.0, [100.0, 0.0], 5.0),
        (0.0, [100.0], 0.0),
    ],
)
def test_the_estimate_wait_is_work_over_the_rates_of_all(
    work_ahead: float, rates: list[float], wait: float | None
) -> None:
    assert estimate_wait(work_ahead, rates) == wait
