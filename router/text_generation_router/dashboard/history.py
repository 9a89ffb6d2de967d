"""History: the last hour of the server, for viewers that open the dashboard.

A row has the difference of two samples as JSON without zeros, about 100 bytes: each second of the last ten minutes, and
twelve seconds at a time before them.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

GAUGES = ("running", "waiting")
COUNTERS = ("new_tokens", "prompt_tokens", "looked_up_tokens", "hit_tokens", "preemptions", "moves")
COUNTS = ("ended", "responses", "first_token", "token_gap")
"""Counters by key or by number of the bucket."""
WORK = ("number", "new_tokens", "steps", "step_seconds")
"""The columns of the work of replicas."""
FINE, COARSE, RECENT = (1.0, 600), (12.0, 300), (4.0, 30)
"""Seconds of a row, and the number of rows. The recent ones have the work of each replica."""

Json = dict[str, Any]


class History:
    """The rows of the last hour."""

    def __init__(self) -> None:
        self._fine, self._coarse = _Rows(*FINE, _difference), _Rows(*COARSE, _difference)
        self._recent = _Rows(*RECENT, _work)

    def add(self, sample: Json) -> None:
        """Add a sample. It must not change afterwards."""
        for rows in (self._fine, self._coarse, self._recent):
            rows.add(sample)

    def shown(self) -> Json:
        """Return the rows, the oldest first."""
        fine = self._fine.rows
        older = [row for at, row in self._coarse.rows if at < fine[0][0]]
        return {"rows": older + [row for _, row in fine], "work": [row for _, row in self._recent.rows]}


class _Rows:
    """Rows that take the same time each."""

    def __init__(self, period_s: float, length: int, read: Callable[[Json, Json], Json]) -> None:
        """`read` makes a row of a sample and the one of the row before."""
        self.rows = deque[tuple[float, orjson.Fragment]](maxlen=length)
        """With the time of their ends."""
        self._period_s = period_s
        self._read = read
        self._last: Json | None = None

    def add(self, sample: Json) -> None:
        now, last = sample["now"], self._last
        if last is None:
            self._last = sample
        elif now - last["now"] > self._period_s - 0.5:  # samples are a second apart
            self.rows.append((now, orjson.Fragment(orjson.dumps(self._read(sample, last)))))
            self._last = sample


def _difference(sample: Json, last: Json) -> Json:
    row: Json = {"now": sample["now"], "elapsed": round(sample["now"] - last["now"], 3)}
    row |= {name: sample[name] for name in GAUGES}
    row |= {name: sample[name] - last[name] for name in COUNTERS}
    for name in COUNTS:
        counts, before = _by_key(sample[name]), _by_key(last[name])
        row[name] = {key: grown for key, count in counts.items() if (grown := count - before.get(key, 0))}
    return {name: value for name, value in row.items() if value}


def _by_key(counts: Mapping[str, int] | Sequence[int]) -> Mapping[str, int]:
    return counts if isinstance(counts, Mapping) else {str(number): count for number, count in enumerate(counts)}


def _work(sample: Json, _: Json) -> Json:
    return {"now": sample["now"], "replicas": [[each[name] for name in WORK] for each in sample["replicas"]]}
