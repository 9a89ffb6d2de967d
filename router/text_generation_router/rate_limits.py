"""The rate limits of API keys: token buckets, counted in one process for all that serve HTTP."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from text_generation_router.errors import RateLimited

MIN_PRUNED = 1024
"""Buckets that are kept without looking for full ones among them."""


@dataclass(frozen=True, slots=True)
class Rates:
    key: str
    """The digest of the key, in hexadecimal digits."""
    requests_per_minute: int | None
    tokens_per_minute: int | None
    """Prompt and new tokens."""


class RateCounter(Protocol):
    """Counts for the rate limits of keys, wherever their buckets are."""

    async def start_request(self, rates: Rates) -> None:
        """Count one request. Raises RateLimited."""

    def spend_tokens(self, rates: Rates, tokens: int) -> None:
        """Count prompt or new tokens."""


class _Bucket:
    """A token bucket: `per_minute` units a minute, at most that many at once."""

    def __init__(self, per_minute: int, unit: str, now: float) -> None:
        self._per_minute = per_minute
        self._unit = unit
        self._level = float(per_minute)
        self._filled_at = now

    def fill(self, now: float) -> float:
        """Add the units since the last call. Return how many are missing until it is full."""
        elapsed = max(0.0, now - self._filled_at)
        self._level = min(float(self._per_minute), self._level + elapsed * self._per_minute / 60)
        self._filled_at = now
        return self._per_minute - self._level

    def check(self, now: float) -> None:
        """Raise RateLimited if less than one unit is left."""
        self.fill(now)
        if self._level < 1:
            message = f"the API key's limit of {self._per_minute} {self._unit} a minute is reached"
            raise RateLimited(message, (1 - self._level) * 60 / self._per_minute)

    def spend(self, units: int) -> None:
        """Take `units`. The level may fall below zero: the price of a request is known at its end."""
        self._level -= units


@dataclass(slots=True)
class RateLimits:
    """The buckets of all keys; a RateCounter. A limit that changes has another bucket, which is full."""

    clock: Callable[[], float] = time.monotonic
    _buckets: dict[tuple[str, str, int], _Bucket] = field(default_factory=dict)
    """By key, unit and limit."""
    _prune_at: int = MIN_PRUNED

    async def start_request(self, rates: Rates) -> None:
        now = self.clock()
        requests = self._bucket(rates.key, "requests", rates.requests_per_minute, now)
        for bucket in (requests, self._bucket(rates.key, "tokens", rates.tokens_per_minute, now)):
            if bucket is not None:
                bucket.check(now)
        if requests is not None:
            requests.spend(1)

    def spend_tokens(self, rates: Rates, tokens: int) -> None:
        now = self.clock()
        bucket = self._bucket(rates.key, "tokens", rates.tokens_per_minute, now)
        if bucket is not None:
            bucket.fill(now)
            bucket.spend(tokens)

    def _bucket(self, key: str, unit: str, per_minute: int | None, now: float) -> _Bucket | None:
        if per_minute is None:
            return None
        bucket = self._buckets.get((key, unit, per_minute))
        if bucket is None:
            if len(self._buckets) >= self._prune_at:  # a full bucket is like a new one
                self._buckets = {name: each for name, each in self._buckets.items() if each.fill(now)}
                self._prune_at = max(MIN_PRUNED, 2 * len(self._buckets))
            bucket = self._buckets[key, unit, per_minute] = _Bucket(per_minute, unit, now)
        return bucket
