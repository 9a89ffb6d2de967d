"""The last hour of the dashboard: bounded, exact at its end, and coarse at its beginning."""

from __future__ import annotations

from typing import Any

import orjson

from text_generation_router.dashboard.state import COARSE, COUNTERS, FINE, RECENT, History

REPLICAS = 8


def sample(second: int) -> dict[str, Any]:
    """The state of a busy server after so many seconds."""
    return {
        "now": 1000.0 + 1.002 * second,
        "running": second % 100,
        "waiting": 0,
        **dict.fromkeys(COUNTERS, 0),
        "new_tokens": 4000 * second,
        "ended": {"length": 30 * second, "error": second // 1800},
        "responses": {"2": second} if second else {},
        "first_token": [0] * 5 + [30 * second] * 8,
        "token_gap": [0] * 9 + [500 * second] * 8,
        "replicas": [
            {"number": number, "new_tokens": 500 * second, "steps": 50 * second, "step_seconds": 0.9 * second}
            for number in range(REPLICAS)
        ],
    }


def test_an_hour_is_kept_in_some_hundred_kilobytes() -> None:
    history = History()
    for second in range(2 * 3600):
        history.add(sample(second))
    encoded = orjson.dumps(history.shown())
    assert len(encoded) < 400_000
    shown = orjson.loads(encoded)
    rows, work = shown["rows"], shown["work"]
    times = [row["now"] for row in rows]
    assert times == sorted(times)
    assert times[-1] == sample(7199)["now"]
    assert 3500 < times[-1] - times[0] < 3700
    fine = rows[-FINE[1] :]
    assert {row["new_tokens"] for row in fine} == {4000}, "each second"
    assert {row["elapsed"] for row in fine} == {1.002}
    assert fine[-1]["ended"] == {"length": 30}, "zeros are left out"
    assert fine[-1]["first_token"] == {str(bucket): 30 for bucket in range(5, 13)}
    coarse = rows[: -FINE[1]]
    assert {row["new_tokens"] for row in coarse} == {4000 * COARSE[0]}, "no token is lost between two rows"
    assert sum(row["ended"].get("error", 0) for row in coarse) == 2, "of 1800 seconds each"
    assert len(work) == RECENT[1]
    assert work[-1]["replicas"][7][:2] == [7, 500 * round((work[-1]["now"] - 1000) / 1.002)]
