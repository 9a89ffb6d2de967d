"""Which token comes next, where that is more than the next one of the prompt.

The model that is made up here expects the prompt's tokens over and over: at position i the most probable token is prompt
token i modulo the prompt's length, the next most probable the one after it, and so on; what is not in the prompt comes
long after. Penalties, bias and draws act on that order, visibly: a test sees whether they took effect.
"""

from __future__ import annotations

import random
from typing import Protocol

FIRST_SHARE = 0.6
"""Probability of the most probable token: top_p up to it, or min_p above what is left to others, leaves no other."""
STEP = 0.7
"""By how much each candidate's logit falls behind the one before it."""
ELSEWHERE = -50.0
"""Logit of a token that is not in the prompt, when the most probable one has 0."""
_draws = random.Random()
"""Of all draws without a seed in this process."""
MASK = (1 << 64) - 1


class Chooser(Protocol):
    """Chooses a sequence's tokens."""

    def choose(self, generated: list[int]) -> int:
        """The next token after `generated`. Raises ChoiceError if there can be none."""


class ChoiceError(Exception):
    """Nothing can come next: the request fails."""


class Draw:
    """Where in the order of candidates the choice falls: 0 for the most probable."""

    def __init__(self, width: int, seed: int | None, index: int) -> None:
        self._width = width
        self._seed = seed
        self._index = index

    def at(self, position: int) -> int:
        """The same for the same seed, sequence and position; without a seed never again the same."""
        if self._width <= 1:
            return 0
        if self._seed is None:
            return _draws.randrange(self._width)
        return _mix(_mix(self._seed & MASK ^ self._index) ^ position) % self._width


class Candidates:
    """Chooses among the prompt's tokens: drawn, not twice the same where that is penalised, none that is forbidden."""

    def __init__(
        self,
        prompt: list[int],
        draw: Draw,
        *,
        ends: frozenset[int],
        min_tokens: int,
        forbidden: frozenset[int],
        avoids_repeats: bool,
        bias: dict[int, float],
    ) -> None:
        self._prompt = prompt
        self._draw = draw
        self._ends = ends
        self._min_tokens = min_tokens
        self._forbidden = forbidden
        self._avoids_repeats = avoids_repeats
        self._bias = bias
        self._distinct = len(set(prompt))

    def choose(self, generated: list[int]) -> int:
        """See Chooser."""
        position = len(generated)
        start = position + self._draw.at(position)
        forbidden = self._forbidden | self._ends if position < self._min_tokens else self._forbidden
        if self._avoids_repeats:
            used = set(generated)
            token = self._best(start, forbidden | used)
            if token is not None:
                return token
        token = self._best(start, forbidden)
        if token is not None:
            return token
        # The prompt has nothing else: whatever is not forbidden.
        return next(other for other in range(len(forbidden) + 1) if other not in forbidden)

    def _best(self, start: int, forbidden: frozenset[int] | set[int]) -> int | None:
        length = len(self._prompt)
        if not self._bias:
            places = (self._prompt[(start + offset) % length] for offset in range(length))
            return next((token for token in places if token not in forbidden), None)
        scores = {token: ELSEWHERE + bias for token, bias in self._bias.items() if bias > 0 and token not in forbidden}
        for offset in range(length):
            token = self._prompt[(start + offset) % length]
            if token not in forbidden:
                scores[token] = max(scores.get(token, ELSEWHERE * 4), self._bias.get(token, 0.0) - STEP * offset)
        return max(scores, key=scores.__getitem__) if scores else None


def width_of(length: int, top_k: int | None, top_p: float | None, min_p: float | None) -> int:
    """Among how many candidates a prompt of `length` tokens leaves the draw."""
    if (top_p is not None and top_p <= FIRST_SHARE) or (min_p is not None and min_p > (1 - FIRST_SHARE) / FIRST_SHARE):
        return 1
    return min(top_k, length) if top_k else length


def _mix(value: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014): neighbouring numbers to far ones."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31
