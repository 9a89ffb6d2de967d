"""Quantiles from buckets: close to the true ones, and exact at the end."""

from __future__ import annotations

import math
from random import Random

import pytest

from text_generation_bench.simulator.histogram import Histogram


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99])
def test_a_quantile_is_within_one_percent(share: float) -> None:
    random = Random(1)
    values = [random.lognormvariate(-4, 1.5) for _ in range(5000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    assert histogram.quantile(share) == pytest.approx(true, rel=0.011)
    assert histogram.longest == max(values)


def test_counts_weigh() -> None:
    histogram = Histogram()
    histogram.add(1.0, 98)
    histogram.add(5.0, 2)
    assert histogram.quantile(0.98) == pytest.approx(1.0, rel=0.01)
    assert histogram.quantile(0.99) == pytest.approx(5.0, rel=0.01)


def test_two_merged_are_as_one() -> None:
    one, other = Histogram(), Histogram()
    one.add(1.0, 3)
    other.add(2.0, 7)
    one.merge(other)
    assert (one.total, one.longest) == (10, 2.0)
    assert one.quantile(0.5) == pytest.approx(2.0, rel=0.01)


def test_nothing_has_no_quantile() -> None:
    assert math.isnan(Histogram().quantile(0.5))


def test_durations_of_nothing_are_counted() -> None:
    histogram = Histogram()
    histogram.add(0.0)
    assert histogram.quantile(0.5) == 0.0
