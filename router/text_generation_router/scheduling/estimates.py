"""Estimates from measurements: new tokens of a request, speed and load of a replica, the wait of the queue."""

import math
from collections.abc import Sequence

_INITIAL_SHARE = 0.5
"""Share of `max_new_tokens` assumed before the first end."""
_INITIAL_WEIGHT = 2
"""Weight of that assumption, in ended requests."""
_MEMORY_REQUESTS = 50
"""Ended requests over which the mean is taken."""

_MEMORY_S = 20.0
"""Time constant of the throughput."""
_LARGEST_GAP_S = 0.1
"""Longest pause between two steps that counts as work (decisions, messages, a busy event loop). A longer one is idle."""
_MIN_WEIGHT_S = 1.0
"""Old measurements weigh at least as much as this many seconds of new steps."""
BUSY_MEMORY_S = 60.0
"""Time constant of the busy ratio."""


class OutputLengths:
    """Mean share of `max_new_tokens` that requests generate.

    Clients that ask for 20 tokens use them; clients that keep the default of 2048 stop long before. So requests are
    counted by the power of two above their limit, and a power not seen yet takes the share of the nearest one seen.
    """

    def __init__(self) -> None:
        self._shares: dict[int, tuple[float, int]] = {}
        """(mean share, ended requests) of the limits in (2^(n-1), 2^n], by n."""

    def expected(self, max_new_tokens: int) -> int:
        """Return the new tokens to expect of a request with this limit: 1 to `max_new_tokens`."""
        share, _ = self._share((max_new_tokens - 1).bit_length())
        return max(1, min(round(share * max_new_tokens), max_new_tokens))

    def record(self, max_new_tokens: int, generated: int) -> None:
        """Record a request that ended by itself or by its limit, not by cancellation or failure."""
        power = (max_new_tokens - 1).bit_length()
        share, ended = self._share(power)
        # A plain mean over the first requests.
        weight = min(ended + 1 + _INITIAL_WEIGHT, _MEMORY_REQUESTS)
        self._shares[power] = share + (generated / max_new_tokens - share) / weight, ended + 1

    def _share(self, power: int) -> tuple[float, int]:
        """Return the share of the nearest power seen (of two, the smaller one), and the requests of this power."""
        if power in self._shares:
            return self._shares[power]
        nearest = min(self._shares, key=lambda seen: (abs(seen - power), seen), default=None)
        return (_INITIAL_SHARE if nearest is None else self._shares[nearest][0]), 0


class Throughput:
    """Tokens per second of one replica while it had work, and the share of time that it worked.

    A ratio of sums, tokens over wall-clock seconds, not a mean of the rates of steps: a queue passes through short and
    long steps, and its wait is the sum of their seconds. Steps made while requests were queued are kept apart: a replica
    with spare room shows the demand, not its capacity.

    A step takes hardly less time for one sequence than for many, so a step that only decodes counts as busy for the share
    of slots or KV blocks in use: one sequence would otherwise keep a replica as busy as a full batch does.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._unexplained_s = 0.0
        """Time between the last reports that no step accounts for."""
        self._sums = {True: (0.0, 0.0, 0.0), False: (0.0, 0.0, 0.0)}
        """(tokens, seconds, time of the last step) of steps while requests were queued, and of others."""
        self._busy = 0.0
        """The busy ratio at the end of the last step."""

    def record(self, now: float, tokens: int, busy_s: float, *, queued: bool = True, share: float = 1.0) -> None:
        """Record a step that ended at `now`, took `busy_s` seconds and computed `tokens` prompt and new tokens.

        `queued`: requests waited for room meanwhile. `share`: that of the step in the busy ratio, 0 to 1.
        """
        elapsed = max(now - self._last, 0.0)
        if elapsed < busy_s:
            # Reports came in a bunch: the work was done when the replica seemed idle.
            seconds = min(elapsed + self._unexplained_s, busy_s)
            self._unexplained_s -= seconds - elapsed
        else:
            # Between consecutive steps the wall clock counts, including gaps.
            seconds = elapsed if elapsed - busy_s <= _LARGEST_GAP_S else busy_s
            self._unexplained_s = elapsed - seconds
        self._busy = self.busy_ratio(now) - share * math.expm1(-min(seconds, busy_s) / BUSY_MEMORY_S)
        self._last = max(now, self._last)
        self._sums[queued] = _decayed_sum(self._sums[queued], self._last, tokens, seconds)

    def rate(self) -> float:
        """Return tokens per second over the last seconds of work; 0 if unknown. Idle time changes nothing."""
        return next((tokens / seconds for tokens, seconds, _ in self._sums.values() if tokens and seconds), 0.0)

    def busy_ratio(self, now: float) -> float:
        """Return the share of time that was spent in steps, 0 to 1: a mean that the last minutes dominate."""
        return min(self._busy * math.exp(min(self._last - now, 0.0) / BUSY_MEMORY_S), 1.0)


class Throughputs(dict[int, Throughput]):
    """The throughputs of all replicas, serving or lost, by number."""

    def wait(self, work: float, replicas: Sequence[int]) -> float | None:
        """Return the seconds in which `replicas` serve `work` tokens; None if unknown."""
        return estimate_wait(work, [self[replica].rate() for replica in replicas])

    def fastest(self) -> list[int]:
        """Return the fastest replica, if there is one."""
        return sorted(self, key=lambda replica: self[replica].rate())[-1:]

    def busy_ratio(self, replicas: Sequence[int], now: float) -> float:
        """Return the mean busy ratio of `replicas`; 0 without one."""
        return sum(self[replica].busy_ratio(now) for replica in replicas) / max(1, len(replicas))


def _decayed_sum(
    sums: tuple[float, float, float], now: float, tokens: int, seconds: float
) -> tuple[float, float, float]:
    """Return (tokens, seconds, now) after exponential decay of `sums` since its time and addition of a step."""
    old_tokens, old_seconds, at = sums
    keep = 1.0
    if old_seconds > 0:
        keep = max(math.exp((at - now) / _MEMORY_S), min(1.0, _MIN_WEIGHT_S / old_seconds))
    return old_tokens * keep + tokens, old_seconds * keep + seconds, now


def estimate_wait(work: float, rates: Sequence[float]) -> float | None:
    """Return the seconds in which replicas with these rates serve `work` tokens; None if no rate is known.

    Rates are tokens per second, 0 if unknown: such a replica counts with the mean of the others.
    """
    known = [rate for rate in rates if rate > 0]
    if not known:
        return None
    return work / (sum(known) / len(known) * len(rates))
