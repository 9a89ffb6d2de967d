"""Measures of a simulation: histogram, fairness, ideal prefix hit rate."""

from __future__ import annotations

import math
from itertools import takewhile
from random import Random

import pytest

from text_generation_bench.simulator.measures import DurationHistogram, FairnessMeter, IdealPrefixCache
from text_generation_router.request import TenantId

A, B = TenantId("a"), TenantId("b")
BLOCK = 4


def histogram(*durations: tuple[float, int]) -> DurationHistogram:
    made = DurationHistogram()
    for seconds, count in durations:
        made.add(seconds, count)
    return made


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99])
def test_quantiles_are_within_one_percent(share: float) -> None:
    random = Random(1)
    values = [random.lognormvariate(-4, 1.5) for _ in range(5000)]
    measured = histogram(*((value, 1) for value in values))
    assert measured.quantile(share) == pytest.approx(sorted(values)[math.ceil(share * 5000) - 1], rel=0.011)
    assert measured.longest == max(values)


def test_histogram_weighs_counts_and_merges() -> None:
    measured = histogram((1.0, 3))
    measured.merge(histogram((1.0, 95), (5.0, 2)))
    assert (measured.total, measured.longest) == (100, 5.0)
    assert measured.quantile(0.98) == pytest.approx(1.0, rel=0.01)
    assert measured.quantile(0.99) == pytest.approx(5.0, rel=0.01)
    assert histogram((0.0, 1)).quantile(0.5) == 0.0
    assert math.isnan(histogram().quantile(0.5))


def test_service_counts_only_while_all_of_several_tenants_are_backlogged() -> None:
    fairness = FairnessMeter()
    fairness.tick({A: 5})
    fairness.serve(A, 10)
    assert fairness.jain is None
    fairness.tick({A: 3, B: 1})
    fairness.serve(A, 300)
    fairness.serve(B, 100)
    fairness.tick({A: 3, B: 1})
    for waiting in ({A: 3, B: 0}, {A: 3, B: 1}):
        fairness.serve(A, 900)
        fairness.tick(waiting)
    assert fairness.jain == pytest.approx(400**2 / (2 * (300**2 + 100**2)))


@pytest.mark.parametrize("seed", range(10))
def test_ideal_hit_rate_equals_comparing_all_prompts(seed: int) -> None:
    random = Random(seed)
    cache = IdealPrefixCache(BLOCK, 1_000_000)
    known: list[tuple[int, ...]] = []
    hits = tokens = 0
    for _ in range(40):
        prompt = tuple(random.choices((1, 2), k=random.randint(1, 20)))
        common = [sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(prompt, text, strict=False))) for text in known]
        hits += min(max(common, default=0) // BLOCK * BLOCK, (len(prompt) - 1) // BLOCK * BLOCK)
        tokens += len(prompt)
        cache.add_prompt(prompt)
        known.append(prompt)
        if random.random() < 0.5:
            answer = tuple(random.choices((1, 2), k=random.randint(1, 9)))
            cache.add_answer(prompt, answer)
            known.append((*prompt, *answer[:-1]))
    assert cache.hit_rate == pytest.approx(hits / tokens)
