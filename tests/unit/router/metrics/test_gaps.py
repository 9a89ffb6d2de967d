"""The gaps between tokens are those each request saw, however they are counted."""

from __future__ import annotations

import random

from text_generation_router.metrics.gaps import TokenGaps, gap_histogram
from text_generation_router.request import RequestId


def ids(*numbers: int) -> set[RequestId]:
    return {RequestId(number) for number in numbers}


def count_and_sum(gaps: TokenGaps) -> tuple[float, float]:
    count, total = (float(line.rsplit(" ", 1)[1]) for line in gaps.histogram.lines()[-2:])
    return count, total


def test_a_first_token_has_no_gap_before_it() -> None:
    gaps = TokenGaps(gap_histogram())
    gaps.step(1.0, ids(1, 2), ids(1, 2))
    assert count_and_sum(gaps) == (0, 0)


def test_requests_in_two_steps_running_share_the_gap() -> None:
    gaps = TokenGaps(gap_histogram())
    gaps.step(1.0, ids(1, 2), ids(1, 2))
    gaps.step(1.5, ids(1, 2, 3), ids(1, 2, 3))
    assert count_and_sum(gaps) == (2, 1.0)


def test_a_request_left_out_of_steps_waited_for_all_of_them() -> None:
    gaps = TokenGaps(gap_histogram())
    for at, served in ((1.0, ids(1, 2)), (2.0, ids(1)), (3.0, ids(1)), (7.0, ids(1, 2))):
        gaps.step(at, served, ids(1, 2))
    assert count_and_sum(gaps) == (4, 1.0 + 1.0 + 4.0 + 6.0)


def test_a_request_that_is_gone_is_forgotten() -> None:
    gaps = TokenGaps(gap_histogram())
    gaps.step(1.0, ids(1, 2, 3), ids(1, 2))
    gaps.step(2.0, ids(1), ids(1, 2))
    gaps.step(3.0, ids(1), ids(1))
    gaps.step(4.0, ids(1), ids(1))
    assert gaps._left_out == {}


def test_shared_or_single_the_gaps_are_each_requests_own() -> None:
    chance = random.Random(7)
    gaps, last, now = TokenGaps(gap_histogram()), dict[RequestId, float](), 0.0
    alive, count, total = ids(*range(8)), 0, 0.0
    for _ in range(500):
        now += chance.choice((0.25, 0.5, 4.0))
        served = {one for one in sorted(alive) if chance.random() < 0.8}
        if not served:
            continue
        for one in served & last.keys():
            count += 1
            total += now - last[one]
        last |= dict.fromkeys(served, now)
        ended = {one for one in sorted(served) if chance.random() < 0.02}
        alive = (alive - ended) | ids(*(one + 100 for one in ended))  # whoever ends is followed by somebody new
        gaps.step(now, served, alive)
    assert count > 1000
    assert count_and_sum(gaps) == (count, total)
