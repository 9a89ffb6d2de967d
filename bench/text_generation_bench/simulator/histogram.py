"""Histogram: quantiles of millions of durations in a few kilobytes, exact to half a percent."""

from __future__ import annotations

import math

_SHORTEST_S = 1e-6
_PER_E = 100
"""Buckets to a factor of e: each is 1 % wide."""


class Histogram:
    """Counts durations, in seconds, by their logarithm."""

    __slots__ = ("_counts", "longest", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0
        """How many there are."""
        self.longest = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` durations of `seconds`."""
        self.total += count
        if seconds > self.longest:
            self.longest = seconds
        bucket = int(math.log(seconds / _SHORTEST_S) * _PER_E) if seconds > _SHORTEST_S else 0
        counts = self._counts
        counts[bucket] = counts.get(bucket, 0) + count

    def merge(self, other: Histogram) -> None:
        """Count what `other` counted."""
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.total += other.total
        self.longest = max(self.longest, other.longest)

    def quantile(self, share: float) -> float:
        """The duration that `share` of them do not exceed; NaN if there are none."""
        if self.total == 0:
            return math.nan
        left = max(1, math.ceil(share * self.total))
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return min(self.longest, _SHORTEST_S * math.exp((bucket + 0.5) / _PER_E))
        return self.longest
