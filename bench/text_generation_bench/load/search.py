"""Search for the highest rate of requests that holds the targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from text_generation_bench.load.settings import LoadSettings
from text_generation_bench.load.workload import Level, levels

CLOSE = 1.05
"""The search ends when the lowest rate that fails is at most so many times the highest that holds."""
MAX_LEVELS = 24


def holds(result: Mapping[str, Any], share: float) -> bool:
    """Return True if at least `share` of a level's requests held all targets."""
    return bool(result["requests"]) and result["goodput"]["share"] >= share


def planned(settings: LoadSettings, results: Sequence[Mapping[str, Any]]) -> Iterator[Level]:
    """Yield the levels of a run; those of a search depend on the results so far.

    The rate is doubled until it fails, or halved until it holds, and then the interval is halved. A rate at which no request
    is due ends it.
    """
    if settings.search_rate is None:
        yield from levels(settings)
        return
    rate, highest, lowest = settings.search_rate, 0.0, math.inf
    for number in range(MAX_LEVELS):
        yield Level(number, f"{rate:.4g}/s", rate, is_open_loop=True)
        if holds(results[-1], settings.target_share):
            highest = max(highest, rate)
        else:
            lowest = min(lowest, rate)
        if lowest <= CLOSE * highest or not results[-1]["requests"]:
            return
        rate = 2 * highest if lowest == math.inf else math.sqrt(highest * lowest) if highest else lowest / 2


def found(settings: LoadSettings, results: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the result of a search: the highest rate that held the targets, None if none did; the lowest that did not."""
    held = {result["value"]: holds(result, settings.target_share) for result in results}
    return {
        "share": settings.target_share,
        "rate": max((rate for rate, holds_them in held.items() if holds_them), default=None),
        "fails_at": min((rate for rate, holds_them in held.items() if not holds_them), default=None),
    }
