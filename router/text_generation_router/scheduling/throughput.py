"""Throughput: how fast a replica works off what waits for it, and how long a queue will take."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MEMORY_S = 20.0
"""Time constant of forgetting."""
_LARGEST_GAP_S = 0.1
"""Time between two steps that still belongs to the work: decisions, messages, a busy event loop. Longer is idleness."""
_LEAST_WEIGHT_S = 1.0
"""However long ago it was: what is known counts as much as this many seconds of new steps."""


class Throughput:
    """Tokens a second of one replica while it had work.

    It is a ratio of sums, tokens over wall-clock seconds, not a mean of each step's rate: a queue passes through short
    steps and long ones in turn, and its wait is the sum of their seconds. Steps made while requests waited are kept
    apart: a replica with room to spare shows what was asked of it, not what it can do.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._unexplained = 0.0
        """Seconds between the last reports that none of them accounts for."""
        self._full = _Sums()
        self._spare = _Sums()

    def record(self, now: float, tokens: int, busy_s: float, *, queued: bool = True) -> None:
        """A step that ended at `now` took `busy_s` seconds and served `tokens`: prompt tokens computed and new ones.

        `queued`: whether requests waited for room meanwhile. A report without time, or of fewer than no tokens, is
        passed over.
        """
        if not 0 < busy_s < math.inf or tokens < 0:
            return
        elapsed = max(now - self._last, 0.0)
        if elapsed < busy_s:
            # It overlaps the report before: they came in a bunch, and its work was done when the replica seemed idle.
            taken = min(elapsed + self._unexplained, busy_s)
            self._unexplained -= taken - elapsed
        else:
            # Back to back the wall clock counts, gaps and all.
            taken = elapsed if elapsed - busy_s <= _LARGEST_GAP_S else busy_s
            self._unexplained = elapsed - taken
        self._last = max(now, self._last)
        (self._full if queued else self._spare).add(self._last, tokens, taken)

    def rate(self, now: float) -> float:
        """Tokens a second of work, over the last seconds of it; 0 if nothing is known. Idle time changes nothing."""
        return self._full.ratio() or self._spare.ratio()


class _Sums:
    """Tokens and the seconds they took, both forgotten at the same pace."""

    __slots__ = ("_at", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._at = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, now: float, tokens: int, seconds: float) -> None:
        if self._seconds > 0:
            keep = math.exp((self._at - now) / _MEMORY_S)
            keep = max(keep, min(1.0, _LEAST_WEIGHT_S / self._seconds))
            self._tokens *= keep
            self._seconds *= keep
        self._tokens += tokens
        self._seconds += seconds
        self._at = now

    def ratio(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


def foreseen_wait(queued_work: float, rates: Sequence[float]) -> float | None:
    """Seconds until replicas of these rates (tokens a second; 0: not known yet) have served `queued_work` tokens.

    None if no rate is known. A replica whose rate is not known is taken to be as fast as the others are in the mean.
    """
    known = [rate for rate in rates if rate > 0]
    if not known:
        return None
    return max(queued_work, 0.0) / (sum(known) / len(known) * len(rates))
