"""Texts as token ids, cheap to make: slices of one pool of random ids.

A slice may be drawn twice, so whatever must be nobody else's begins with an id that is used once.
"""

from __future__ import annotations

from random import Random

POOL_TOKENS = 1 << 18
LONGEST = 1 << 17
"""Tokens of the longest slice."""
VOCABULARY = 32_000


class TokenPool:
    """Random ids, from which texts are cut. The same seed gives the same ids."""

    def __init__(self, seed: int) -> None:
        ids = Random(seed).choices(range(VOCABULARY), k=POOL_TOKENS)
        self.ids: tuple[int, ...] = (*ids, *ids[:LONGEST])
        """`ids[at : at + length]` is a text wherever it begins below POOL_TOKENS."""
        self._unique = VOCABULARY

    def text(self, random: Random, length: int) -> tuple[int, ...]:
        """`length` tokens, between 1 and LONGEST, that no other text begins with."""
        self._unique += 1
        at = int(random.random() * POOL_TOKENS)
        return (self._unique, *self.ids[at + 1 : at + length])

    def answer_at(self, random: Random) -> int:
        """Where in `ids` an answer begins."""
        return int(random.random() * POOL_TOKENS)
