"""How prompts share a step's budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.chunking import share_budget
from text_generation_router.scheduling.sequence import ScheduledSequence


def prompts(*lengths: int) -> list[ScheduledSequence]:
    """Entries with so many prompt tokens to be ordered, the oldest first."""
    entries = []
    for number, length in enumerate(lengths):
        entry = ScheduledSequence(Request(RequestId(number), (1,) * length, 1), number, 0.0, 1)
        entry.prefill_length = length
        entries.append(entry)
    return entries


def shared(budget: int, *lengths: int) -> dict[int, int]:
    return {int(entry.request.id): chunk for entry, chunk in share_budget(prompts(*lengths), budget)}


def test_what_fits_goes_whole() -> None:
    assert shared(100, 30, 20, 50) == {0: 30, 1: 20, 2: 50}


def test_the_shortest_goes_first_but_the_oldest_has_half() -> None:
    assert shared(64, 1000, 200, 10, 20) == {0: 32, 2: 10, 3: 20, 1: 2}


def test_what_the_short_ones_leave_is_the_oldest_ones() -> None:
    assert shared(64, 1000, 10) == {1: 10, 0: 54}


def test_of_equals_the_oldest_goes_first() -> None:
    assert shared(50, 40, 40, 40) == {0: 40, 1: 10}


def test_a_budget_of_one_is_the_oldest_ones() -> None:
    assert shared(1, 5, 1) == {0: 1}


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12), budget=st.integers(1, 400))
def test_the_budget_is_used_whole_never_exceeded_and_half_of_it_is_the_oldest_ones(
    lengths: list[int], budget: int
) -> None:
    chunks = shared(budget, *lengths)
    assert sum(chunks.values()) == min(budget, sum(lengths))
    assert all(0 < chunk <= lengths[number] for number, chunk in chunks.items())
    assert chunks[0] >= min(lengths[0], budget / 2)
