"""Jain's index, and that only seconds count in which every tenant had something waiting."""

from __future__ import annotations

import pytest

from text_generation_bench.simulator.fairness import Fairness, jain_index
from text_generation_router.request import TenantId

ONE, OTHER = TenantId("one"), TenantId("other")


def test_equal_shares_are_one_and_a_monopoly_is_one_over_n() -> None:
    assert jain_index([5, 5, 5]) == pytest.approx(1.0)
    assert jain_index([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain_index([]) is None
    assert jain_index([0, 0]) is None


def test_service_counts_while_all_are_backlogged() -> None:
    fairness = Fairness()
    fairness.tick({ONE: 3, OTHER: 1})
    fairness.serve(ONE, 100)
    fairness.serve(OTHER, 100)
    fairness.tick({ONE: 3, OTHER: 1})
    fairness.serve(ONE, 900)
    fairness.tick({ONE: 3, OTHER: 0})
    fairness.serve(ONE, 900)
    fairness.tick({ONE: 3, OTHER: 1})
    assert fairness.jain == pytest.approx(1.0)


def test_a_tenant_that_gets_less_while_it_waits_is_seen() -> None:
    fairness = Fairness()
    fairness.tick({ONE: 3, OTHER: 1})
    fairness.serve(ONE, 300)
    fairness.serve(OTHER, 100)
    fairness.tick({ONE: 3, OTHER: 1})
    assert fairness.jain == pytest.approx(400**2 / (2 * (300**2 + 100**2)))


def test_one_tenant_alone_has_no_index() -> None:
    fairness = Fairness()
    for _ in range(3):
        fairness.serve(ONE, 10)
        fairness.tick({ONE: 5})
    assert fairness.jain is None
