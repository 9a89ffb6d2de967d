"""The number of tokens to draft in a step: that with most expected tokens per second, by what earlier steps have shown.

With rows r, drafts of lengths k and probabilities p that a token is right if those before it are, a step yields

    tokens(k) = Σ_r 1 + p_r1 + p_r1 · p_r2 + … + p_r1 ⋯ p_rk

in T(rows + Σ k) seconds. T is measured by number of tokens, p by source and length of the match. A step without drafts yields
`rows` tokens in its own measured time, which is shorter where steps run ahead. Nothing is drafted for less than MARGIN.
Numbers of tokens that no step had are taken to cost no more than fewer ones, so that they are tried once.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 1.04
"""Least factor of expected tokens per second for which a step drafts."""
PROBE_STEPS = 48
"""Steps with drafts after which one without is measured again."""
FORGET_STEPS = 2048
"""Steps after which a measured time is forgotten, so that it is tried again."""
COMPILING = 16
"""Factor by which a step that compiles a kernel takes longer, at least; more tokens alone do not."""
LEAST_RATE = 0.1
"""Least weight of a new step time."""
LEAST_LEARNING = 1 / 64
"""Least weight of a new draft token in its probability."""
PRIOR_TOKENS = 4
"""Weight of the first estimate of a probability, in draft tokens."""
LEAST_GAIN = 0.05
"""A token is not drafted if it is expected to add fewer tokens."""
LENGTHS = (2, 4, 8, 16)
"""Upper bounds of the lengths of matches that share a probability; the last group has no bound."""
FIRST_ESTIMATES = (0.3, 0.5, 0.6, 0.75, 0.85)


@dataclass(slots=True)
class _Estimate:
    value: float
    weight: float
    step: int = 0


class Acceptance:
    """The probability that the token after a match is the one that followed it before, by source and length of the match."""

    def __init__(self) -> None:
        self._estimates: dict[tuple[str, int], _Estimate] = {}

    def know(self, source: str, probability: float) -> None:
        """Set the probability of all tokens of a source."""
        for group in range(len(FIRST_ESTIMATES)):
            self._estimates[source, group] = _Estimate(probability, PRIOR_TOKENS)

    def probability(self, source: str, length: int) -> float:
        """Return the probability of the next token of a match of `length` tokens."""
        return self._of(source, length).value

    def add(self, source: str, length: int, *, right: bool) -> None:
        """Count a token that followed a match."""
        estimate = self._of(source, length)
        estimate.weight += 1
        estimate.value += (right - estimate.value) * max(1 / estimate.weight, LEAST_LEARNING)

    def gains(self, source: str, length: int, tokens: int) -> list[float]:
        """Return the tokens that each token of a draft is expected to add, as many as add LEAST_GAIN."""
        gains: list[float] = []
        gain = 1.0
        for place in range(tokens):
            gain *= self.probability(source, length + place)
            if gain < LEAST_GAIN:
                break
            gains.append(gain)
        return gains

    def forget(self, source: str) -> None:
        """Begin anew with the probabilities of a source."""
        self._estimates = {key: each for key, each in self._estimates.items() if key[0] != source}

    def _of(self, source: str, length: int) -> _Estimate:
        group = bisect_left(LENGTHS, length)
        if (estimate := self._estimates.get((source, group))) is None:
            estimate = self._estimates[source, group] = _Estimate(FIRST_ESTIMATES[group], PRIOR_TOKENS)
        return estimate


class StepTimes:
    """Seconds of a decode step by its number of tokens."""

    def __init__(self) -> None:
        self._estimates: dict[int, _Estimate] = {}
        self._sizes: list[int] = []
        """The keys, in order."""
        self._steps = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step. One that took far longer than those before it, by other work of the machine, counts as twice as long.

        The first one of a size is not counted if it took COMPILING times as long as others do.
        """
        self._steps += 1
        size = _size(tokens)
        estimate = self._estimates.get(size)
        if estimate is None:
            if seconds > COMPILING * (self.expected(tokens) or seconds):
                return
            self._estimates[size] = estimate = _Estimate(seconds, 0.0)
            self._sizes = sorted(self._estimates)
        estimate.weight, estimate.step = estimate.weight + 1, self._steps
        estimate.value += (min(seconds, 2 * estimate.value) - estimate.value) * max(1 / estimate.weight, LEAST_RATE)
        if self._steps % FORGET_STEPS == 0:
            old = self._steps - FORGET_STEPS
            self._estimates = {size: each for size, each in self._estimates.items() if each.step > old}
            self._sizes = sorted(self._estimates)

    def expected(self, tokens: int) -> float | None:
        """Return the time of a step: measured, or between those of its neighbours, or that of the nearest; None without any."""
        sizes = self._sizes
        if not sizes:
            return None
        size = _size(tokens)
        place = min(bisect_left(sizes, size), len(sizes) - 1)
        above = sizes[place]
        if place == 0 or above <= size:
            return self._estimates[above].value
        below = sizes[place - 1]
        first, last = self._estimates[below].value, self._estimates[above].value
        return first + (last - first) * (size - below) / (above - below)


def _size(tokens: int) -> int:
    return tokens if tokens <= 16 else -(-tokens // 8) * 8


@dataclass(slots=True)
class DraftLengths:
    """Decides how many tokens of each possible draft a step computes, at most `max_tokens` in all."""

    max_tokens: int
    plain: StepTimes
    """Times of steps that begin before the tokens of the one before are known."""
    waiting: StepTimes
    """Times of steps that wait for these tokens; the same object as `plain` where all do."""
    _since_plain: int = 0
    """Steps with drafts since one of `plain` without."""

    def add(self, tokens: int, seconds: float, *, drafted: bool, began_ahead: bool) -> None:
        """Count a decode step that computed `tokens` tokens."""
        is_plain = began_ahead or self.plain is self.waiting
        (self.plain if is_plain else self.waiting).add(tokens, seconds)
        if drafted:
            self._since_plain += 1
        elif is_plain:
            self._since_plain = 0

    def choose(self, rows: int, gains: Sequence[Sequence[float]], lead: int = 0) -> list[int] | None:
        """Return the length of each draft, or None if the step should have none.

        `rows` is the number of rows, gains[i] are those of the tokens of draft i. `lead`: so many tokens of each draft come with a
        step in progress, and add nothing to this one.
        """
        if (limit := self._limit(rows)) is None:
            return None
        lengths, best = [0] * len(gains), None
        ordered = sorted(((gain, i) for i, each in enumerate(gains) for gain in each[lead:]), reverse=True)
        expected, tokens = float(rows), rows
        for gain, i in ordered[: self.max_tokens - rows]:
            expected, tokens = expected + gain, tokens + 1
            lengths[i] += 1
            if (rate := expected / self._drafting_time(tokens, rows)) > limit:
                limit, best = rate, lengths.copy()
        return best

    def may_pay(self, rows: int, most: int) -> bool:
        """Return False if drafts of at most `most` tokens would not pay even if all of them were right."""
        if (limit := self._limit(rows)) is None:
            return False
        return any(
            tokens / self._drafting_time(tokens, rows) > limit
            for tokens in range(rows + 1, min(rows * (1 + most), self.max_tokens) + 1, max(1, rows // 4))
        )

    def speedup(self, rows: int, gains: Sequence[float], pass_s: float) -> float:
        """Return the factor of tokens per second by drafts of all rows with these gains, whose tokens take `pass_s` each; inf if unknown."""
        if (plain := self.plain.expected(rows)) is None:
            return math.inf
        factors = [
            (1 + sum(gains[:length])) * plain / (self._drafting_time(rows * (1 + length), rows) + length * pass_s)
            for length in range(1, len(gains) + 1)
            if rows * (1 + length) <= self.max_tokens
        ]
        return max(factors, default=0.0)

    def _limit(self, rows: int) -> float | None:
        """Return the expected tokens per second to exceed; None if no drafts should be made."""
        seconds = self.plain.expected(rows)
        return None if seconds is None or self._since_plain >= PROBE_STEPS else MARGIN * rows / seconds

    def _drafting_time(self, tokens: int, rows: int) -> float:
        # No less than a step without drafts takes.
        seconds = self.plain.expected(rows) or 0.0
        return max(self.waiting.expected(tokens) or 0.0, 0.9 * seconds)
