"""Instruments write Prometheus' text format, and have all their series from the start."""

from __future__ import annotations

import pytest

from text_generation_router.metrics.instruments import Counter, Histogram


def test_a_histogram_is_cumulative_and_its_bounds_inclusive() -> None:
    histogram = Histogram("h", "Help", [1, 2, 3])
    for value in (1, 1.5, 2, 9):
        histogram.observe(value)
    assert histogram.text().splitlines() == [
        "# HELP h Help",
        "# TYPE h histogram",
        'h_bucket{le="1"} 1.0',
        'h_bucket{le="2"} 3.0',
        'h_bucket{le="3"} 3.0',
        'h_bucket{le="+Inf"} 4.0',
        "h_count 4.0",
        "h_sum 13.5",
    ]


def test_a_counter_has_every_label_value_before_it_counts() -> None:
    counter = Counter("c", "Help", "err", ["one", "two"])
    counter.add("two", 5)
    assert counter.text().splitlines() == ["# HELP c Help", "# TYPE c counter", 'c{err="one"} 0', 'c{err="two"} 5']


def test_a_label_value_that_was_not_agreed_on_is_refused() -> None:
    with pytest.raises(KeyError):
        Counter("c", "", "err", ["one"]).add("from a client")
    with pytest.raises(KeyError):
        Histogram("h", "", [1], "method", ["prefill"]).of("from a client")
