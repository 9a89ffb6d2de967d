"""The next token, where it is not simply the next one of the prompt.

The made-up model expects the tokens of the prompt again and again: at position i the most probable token is prompt token i modulo
the prompt's length, then the one after it, and so on; tokens outside the prompt are far less probable. Penalties, bias and draws act
on this order, so that a test sees their effect.
"""

from __future__ import annotations

import random
from typing import Protocol

FIRST_SHARE = 0.6
"""Probability of the most probable token: top_p up to it, or a min_p above the others' share, leaves no other token."""
STEP = 0.7
"""Difference between the logits of neighbouring candidates."""
ELSEWHERE = -50.0
"""Logit of tokens outside the prompt; the most probable token has 0."""
MASK = (1 << 64) - 1
_draws = random.Random()
"""Draws without a seed."""


class Chooser(Protocol):
    """Chooses the tokens of a sequence."""

    def choose(self, generated: list[int]) -> int:
        """Return the token after `generated`. Raises ChoiceError if there is none."""


class ChoiceError(Exception):
    """No token can follow; the request fails."""


class Draw:
    """Draws the rank of the chosen candidate; 0 is the most probable one."""

    def __init__(self, width: int, seed: int | None) -> None:
        self._width = width
        self._seed = seed

    def at(self, position: int) -> int:
        """Return the rank at a position: the same for the same seed, random without a seed."""
        if self._width <= 1:
            return 0
        if self._seed is None:
            return _draws.randrange(self._width)
        return _mix(_mix(self._seed & MASK) ^ position) % self._width


class Candidates:
    """Chooses among the tokens of the prompt."""

    def __init__(
        self,
        prompt: list[int],
        draw: Draw,
        *,
        ends: frozenset[int],
        min_tokens: int,
        avoids_repeats: bool,
        bias: dict[int, float],
    ) -> None:
        self._prompt = prompt
        self._draw = draw
        self._ends = ends
        self._min_tokens = min_tokens
        self._avoids_repeats = avoids_repeats
        self._bias = bias

    def choose(self, generated: list[int]) -> int:
        """See Chooser."""
        position = len(generated)
        start = position + self._draw.at(position)
        forbidden = self._ends if position < self._min_tokens else frozenset()
        token = self._best(start, forbidden.union(generated)) if self._avoids_repeats else None
        if token is None:
            token = self._best(start, forbidden)
        if token is None:  # the prompt has no other token
            token = next(other for other in range(len(forbidden) + 1) if other not in forbidden)
        return token

    def _best(self, start: int, forbidden: frozenset[int]) -> int | None:
        length = len(self._prompt)
        if not self._bias:
            ranked = (self._prompt[(start + offset) % length] for offset in range(length))
            return next((token for token in ranked if token not in forbidden), None)
        scores = {token: ELSEWHERE + bias for token, bias in self._bias.items() if bias > 0 and token not in forbidden}
        for offset in range(length):
            token = self._prompt[(start + offset) % length]
            if token not in forbidden:
                scores[token] = max(scores.get(token, ELSEWHERE * 4), self._bias.get(token, 0.0) - STEP * offset)
        return max(scores, key=scores.__getitem__) if scores else None


def width_of(length: int, top_k: int | None, top_p: float | None, min_p: float | None) -> int:
    """Return the number of candidates for a prompt of `length` tokens."""
    if (top_p is not None and top_p <= FIRST_SHARE) or (min_p is not None and min_p > (1 - FIRST_SHARE) / FIRST_SHARE):
        return 1
    return min(top_k, length) if top_k else length


def _mix(value: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31
