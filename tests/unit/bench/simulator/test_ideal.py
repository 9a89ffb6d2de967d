"""The ideal hit rate, against comparing every prompt with everything before it."""

from __future__ import annotations

from random import Random

import pytest

from text_generation_bench.simulator.ideal import IdealCache

BLOCK = 4


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_comparing_all_with_all_says(seed: int) -> None:
    random = Random(seed)
    cache = IdealCache(BLOCK, 1_000_000)
    known: list[tuple[int, ...]] = []
    hits = tokens = 0
    for _ in range(40):
        prompt = tuple(random.choices((1, 2), k=random.randint(1, 20)))
        best = max((common(prompt, one) // BLOCK * BLOCK for one in known), default=0)
        hits += min(best, (len(prompt) - 1) // BLOCK * BLOCK)
        tokens += len(prompt)
        cache.arrive(prompt)
        known.append(prompt)
        if random.random() < 0.5:
            answer = tuple(random.choices((1, 2), k=random.randint(1, 9)))
            cache.answer(prompt, answer)
            known.append((*prompt, *answer[:-1]))
    assert cache.hit_rate == pytest.approx(hits / tokens)


def test_the_next_turn_of_a_chat_hits_the_answer_before_it() -> None:
    cache = IdealCache(BLOCK, 1_000_000)
    prompt, answer = tuple(range(4)), tuple(range(10, 15))
    cache.arrive(prompt)
    cache.answer(prompt, answer)
    cache.arrive((*prompt, *answer, 99))
    assert cache.hit_rate == pytest.approx(8 / 14)


def test_it_gives_up_rather_than_remember_without_bound() -> None:
    cache = IdealCache(BLOCK, 2)
    cache.arrive(tuple(range(12)))
    cache.arrive(tuple(range(12)))
    assert cache.hit_rate is None


def test_nothing_asked_is_no_rate() -> None:
    assert IdealCache(BLOCK, 10).hit_rate is None
