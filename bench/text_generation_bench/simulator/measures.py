"""Measures of a simulation: duration histogram, fairness between tenants, ideal prefix hit rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from text_generation_router.request import TenantId

_SHORTEST_S = 1e-6
_BUCKETS_PER_E = 100
"""Buckets per factor of e: each is 1 % wide."""


class DurationHistogram:
    """Counts durations, in seconds, in logarithmic buckets. Quantiles are exact to half a percent."""

    __slots__ = ("_counts", "longest", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0
        self.longest = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a duration `count` times."""
        self.total += count
        if seconds > self.longest:
            self.longest = seconds
        bucket = int(math.log(seconds / _SHORTEST_S) * _BUCKETS_PER_E) if seconds > _SHORTEST_S else 0
        counts = self._counts
        counts[bucket] = counts.get(bucket, 0) + count

    def merge(self, other: DurationHistogram) -> None:
        """Add the counts of another histogram."""
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.total += other.total
        self.longest = max(self.longest, other.longest)

    def quantile(self, share: float) -> float:
        """Return the duration that `share` of all do not exceed; NaN without durations."""
        if self.total == 0:
            return math.nan
        left = max(1, math.ceil(share * self.total))
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return min(self.longest, _SHORTEST_S * math.exp((bucket + 0.5) / _BUCKETS_PER_E))
        return self.longest


class FairnessMeter:
    """Adds up the service of each tenant or job over the seconds in which every tenant was backlogged.

    Service is the number of computed prompt tokens plus new tokens. Jobs of one tenant are compared while any of them waits.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._backlogged = False
        self._counted: dict[str, int] = {}

    def serve(self, name: str, tokens: int) -> None:
        """Add tokens to the service of a tenant or job."""
        self._served[name] = self._served.get(name, 0) + tokens

    def tick(self, waiting: Mapping[TenantId, int]) -> None:
        """End a second. `waiting` has the number of each tenant's requests that have never left the queue."""
        backlogged = max(len(waiting), len(self._served)) > 1 and all(waiting.values())
        if backlogged and self._backlogged:
            for name, served in self._served.items():
                self._counted[name] = self._counted.get(name, 0) + served - self._before.get(name, 0)
        self._backlogged = backlogged
        self._before = dict(self._served)

    @property
    def jain(self) -> float | None:
        """Jain's index of the counted service: 1 if equal, 1/n if one of n tenants got everything; None without any."""
        return jain_index(self._counted.values())


def jain_index(shares: Iterable[float]) -> float | None:
    """Return (Σ x)² / (n · Σ x²), after Jain, Chiu and Hawe (1984); None if all are 0."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


class IdealPrefixCache:
    """Counts the prefix hits of a cache that forgets nothing, on a single replica.

    It remembers the hash of every prefix of whole blocks, and so shares no code with the prefix tree that it is compared
    with.
    """

    def __init__(self, block_size: int, max_prefixes: int) -> None:
        """Beyond `max_prefixes` it gives up, and `hit_rate` is None."""
        self._block_size = block_size
        self._max_prefixes = max_prefixes
        self._seen: set[int] = set()
        self._prompt_tokens = 0
        self._hit_tokens = 0

    def add_prompt(self, prompt: tuple[int, ...]) -> None:
        """Count the hits of a new request. At least one token of a prompt must be computed."""
        if len(self._seen) > self._max_prefixes:
            return
        size = self._block_size
        hit = 0
        prefixes = self._prefixes(prompt)
        for number, prefix in enumerate(prefixes[: (len(prompt) - 1) // size], start=1):
            if prefix not in self._seen:
                break
            hit = number * size
        self._prompt_tokens += len(prompt)
        self._hit_tokens += hit
        self._seen.update(prefixes)

    def add_answer(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
        """Remember the prefixes of a finished answer. The KV of its last token is never computed."""
        if len(self._seen) <= self._max_prefixes:
            self._seen.update(self._prefixes((*prompt, *answer[:-1])))

    def _prefixes(self, tokens: tuple[int, ...]) -> list[int]:
        size = self._block_size
        prefixes = []
        prefix = 0
        for start in range(0, len(tokens) - size + 1, size):
            prefix = hash((prefix, tokens[start : start + size]))
            prefixes.append(prefix)
        return prefixes

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens over prompt tokens; None if it gave up or there were no prompts."""
        if len(self._seen) > self._max_prefixes or not self._prompt_tokens:
            return None
        return self._hit_tokens / self._prompt_tokens
