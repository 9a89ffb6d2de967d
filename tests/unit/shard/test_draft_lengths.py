"""The length of drafts: close to the best one, and never slower than without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from full_grid import full

from text_generation_shard.step.drafts.length import Acceptance, DraftLengths, StepTimes

MOST = 8
STEPS = 1000
SECONDS: dict[str, Callable[[int], float]] = {
    "memory-bound": lambda tokens: 0.004 + 0.00001 * tokens,
    "compute-bound": lambda tokens: 0.002 + 0.001 * tokens,
    "products of 8 rows": lambda tokens: 0.003 * -(-tokens // 8),
}
WAITING = 1.1
"""Factor of a step's time if it waits for the tokens of the one before."""


def best_rate(seconds: Callable[[int], float], rows: int, right: float, max_tokens: int) -> float:
    """Return the most tokens per second of drafts of one length for all rows, or of none."""
    lengths = range(1, min(MOST, max_tokens // rows - 1) + 1)
    drafted = (
        rows * sum(right**place for place in range(length + 1)) / (WAITING * seconds(rows * (1 + length)))
        for length in lengths
    )
    return max([rows / seconds(rows), *drafted])


def simulate(seconds: Callable[[int], float], rows: int, right: float, *, runs_ahead: bool) -> float:
    """Return the tokens per second of STEPS steps."""
    draw = random.Random(rows)
    plain, acceptance = StepTimes(), Acceptance()
    lengths = DraftLengths(256, plain, StepTimes() if runs_ahead else plain)
    elapsed, tokens, waited = 0.0, 0, True
    for _ in range(STEPS):
        gains = [acceptance.gains("own", 5, MOST) for _ in range(rows)]
        chosen = lengths.choose(rows, gains) or [0] * rows
        drafted = any(chosen)
        ahead = runs_ahead and not drafted and not waited
        took = seconds(rows + sum(chosen)) * (1 if ahead else WAITING)
        lengths.add(rows + sum(chosen), took * draw.uniform(0.98, 1.02), drafted=drafted, began_ahead=ahead)
        waited = drafted
        elapsed, tokens = elapsed + took, tokens + rows
        for length in chosen:
            # The token after a match is known even if it is not drafted.
            for place in range(max(1, length)):
                is_right = draw.random() < right
                acceptance.add("own", 5 + place, right=is_right)
                tokens += is_right and place < length
                if not is_right:
                    break
    return tokens / elapsed


@pytest.mark.parametrize(
    ("rows", "right"),
    [
        *((rows, right) for rows in (1, 8) for right in (0.0, 0.3, 0.6, 0.9)),
        *((40, 0.6), *(full(100, right) for right in (0.0, 0.3, 0.6, 0.9))),
    ],
)
@pytest.mark.parametrize("seconds", SECONDS.values(), ids=SECONDS)
def test_the_rate_is_near_the_best_and_never_below_that_without_drafts(
    seconds: Callable[[int], float], rows: int, right: float
) -> None:
    rate = simulate(seconds, rows, right, runs_ahead=True)
    assert rate >= 0.99 * rows / seconds(rows)
    assert rate >= 0.84 * best_rate(seconds, rows, right, 256)


def test_nothing_is_looked_up_where_no_draft_can_pay() -> None:
    lengths = DraftLengths(64, times := StepTimes(), times)
    for tokens in (8, 16, 32, 64):
        lengths.add(tokens, 0.001 * tokens, drafted=False, began_ahead=False)
    assert not lengths.may_pay(8, MOST)
    assert not lengths.may_pay(64, MOST)
    lengths.add(32, 0.0005, drafted=True, began_ahead=False)
    assert lengths.may_pay(8, MOST)


def test_a_hiccup_of_the_machine_changes_little() -> None:
    times = StepTimes()
    for _ in range(20):
        times.add(1, 0.01)
    times.add(1, 3.0)
    assert (times.expected(1) or 0) < 0.012


def test_the_time_of_a_size_that_was_not_measured_is_between_its_neighbours() -> None:
    times = StepTimes()
    assert times.expected(3) is None
    times.add(2, 0.01)
    assert times.expected(12) == 0.01
    times.add(6, 0.03)
    assert times.expected(4) == pytest.approx(0.02)
    assert times.expected(1) == 0.01
