"""Drafts by lookup: the tokens that followed the last ones of a sequence before, in its own text or in recent outputs.

An index maps a hash of each run of n tokens to the place after its last occurrence. A sequence whose last tokens are found there
follows that text as long as its new tokens equal it, which costs one comparison a token. Texts are token ids. Those of recent
outputs are kept by scope, two generations of RECENT_TOKENS each: sequences of different scopes share nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from text_generation_shard.step.drafts.length import Acceptance
from text_generation_shard.step.sequence import Sequence

RUNS = (5, 3)
"""Lengths of the runs of tokens that are looked up, in this order."""
LONGEST_MATCH = 32
"""Last tokens that are compared with those before a place."""
INDEXED_TOKENS = 32768
"""Tokens of a sequence that are indexed: the last ones. About 3 MB."""
TOKENS_AT_ONCE = 4096
"""Tokens that are indexed in a step, about a millisecond."""
FEW_TOKENS = 32
"""Up to so many new tokens are compared one by one."""
RECENT_TOKENS = 16384
RECENT_SCOPES = 32
END = (1 << 32) - 1
"""Ends an output among others: no token."""
MULTIPLIER = 0x9E3779B97F4A7C15
MASK = (1 << 61) - 1


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses of the next tokens of a sequence."""

    tokens: tuple[int, ...]
    source: str
    match: int
    """Tokens before them that were found."""


class TokenIndex:
    """The places after the runs of `tokens`, which may grow, from token `start` on."""

    def __init__(self, tokens: list[int], start: int = 0) -> None:
        self.tokens = tokens
        self.end = start
        """Runs that end here or before are indexed."""
        self._start = start
        self._places: tuple[dict[int, int], ...] = tuple({} for _ in RUNS)

    def extend(self, end: int) -> None:
        """Index the runs that end at `end` or before."""
        first, self.end = self.end + 1, max(self.end, end)
        for run, places in zip(RUNS, self._places, strict=True):
            low = max(first, self._start + run)
            if end - low < FEW_TOKENS:
                for place in range(low, end + 1):
                    places[_hash(self.tokens[place - run : place])] = place
                continue
            tokens = np.array(self.tokens[low - run : end], dtype=np.uint64)
            hashes = np.zeros(end - low + 1, dtype=np.uint64)
            for offset in range(run):
                hashes = hashes * np.uint64(MULTIPLIER) + tokens[offset : offset + len(hashes)]
            places.update(zip((hashes & np.uint64(MASK)).tolist(), range(low, end + 1), strict=True))

    def find(self, last: list[int]) -> tuple[int, int]:
        """Return a place after tokens that equal the end of `last`, and the number of these; (0, 0) if there is none."""
        for run, places in zip(RUNS, self._places, strict=True):
            if len(last) >= run and (place := places.get(_hash(last[-run:]), 0)):
                before = self.tokens[max(self._start, place - len(last)) : place]
                pairs = zip(reversed(before), reversed(last), strict=False)
                length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                if length >= run:  # else two runs have the same hash
                    return place, length
        return 0, 0


def _hash(run: list[int]) -> int:
    value = 0
    for token in run:
        value = value * MULTIPLIER + token
    return value & MASK


@dataclass(slots=True)
class _Followed:
    """The place in a text that a sequence is expected to follow."""

    tokens: list[int]
    place: int
    match: int
    source: str


@dataclass(slots=True)
class _Known:
    """The state of a sequence."""

    sequence: Sequence
    index: TokenIndex
    seen: int = 0
    """Tokens that were compared."""
    followed: _Followed | None = None


@dataclass(slots=True)
class _Recent:
    """Outputs of one scope: those that are added to, and the ones before."""

    current: TokenIndex = field(default_factory=lambda: TokenIndex([]))
    before: TokenIndex = field(default_factory=lambda: TokenIndex([]))

    def add(self, tokens: list[int]) -> None:
        if len(self.current.tokens) >= RECENT_TOKENS:
            self.before, self.current = self.current, TokenIndex([])
        self.current.tokens += [*tokens[-RECENT_TOKENS:], END]
        self.current.extend(len(self.current.tokens) - 1)


class LookupDrafts:
    """Drafts by lookup, for the sequences of an engine. Tells `acceptance` of each token that followed a match."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._known: dict[int, _Known] = {}
        """By slot."""
        self._recent: OrderedDict[tuple[str, str], _Recent] = OrderedDict()
        """By scope, the last used at the end."""

    def forget_ended(self) -> None:
        """Forget the sequences that ended; keep what they generated."""
        for slot, known in list(self._known.items()):
            if not (sequence := known.sequence).is_held:
                del self._known[slot]
                self._keep(sequence)

    def drafts(self, sequence: Sequence, most: int) -> Draft | None:
        """Return at most `most` tokens that may come next; None without a match."""
        known = self._known.get(sequence.slot)
        if known is None or known.sequence is not sequence:
            if known is not None:
                self._keep(known.sequence)
            first = max(0, len(sequence.tokens) - INDEXED_TOKENS)
            known = self._known[sequence.slot] = _Known(sequence, TokenIndex(sequence.tokens, first))
        self._catch_up(known)
        if (followed := known.followed) is None or most < 1:
            return None
        tokens = followed.tokens[followed.place : followed.place + most]
        if followed.tokens is sequence.tokens and len(tokens) < most:
            tokens = (tokens * most)[:most]  # it repeats itself
        if END in tokens:
            tokens = tokens[: tokens.index(END)]
        return Draft(tuple(tokens), followed.source, followed.match) if tokens else None

    def _catch_up(self, known: _Known) -> None:
        """Compare the new tokens with those followed; look the last ones up if they differ."""
        tokens, index = known.sequence.tokens, known.index
        end = len(tokens)
        if end == known.seen:
            return
        if end - index.end > TOKENS_AT_ONCE:
            index.extend(index.end + TOKENS_AT_ONCE)
            known.followed = None
            return
        if known.followed is not None and not self._follow(known.followed, tokens[known.seen :]):
            known.followed = None
        known.seen = end
        if known.followed is None:
            index.extend(end - 1)
            known.followed = self._found(known, tokens[-LONGEST_MATCH:])
        index.extend(end)

    def _follow(self, followed: _Followed, tokens: list[int]) -> bool:
        """Go on by some tokens; return False if they are others, or the text ends."""
        for token in tokens:
            if followed.place == len(followed.tokens) or (expected := followed.tokens[followed.place]) == END:
                return False
            self._acceptance.add(followed.source, followed.match, right=token == expected)
            if token != expected:
                return False
            followed.place += 1
            followed.match += 1
        return True

    def _found(self, known: _Known, last: list[int]) -> _Followed | None:
        place, match = known.index.find(last)
        best = _Followed(known.index.tokens, place, match, "own") if match else None
        if recent := self._recent.get(known.sequence.draft_scope):
            for index in (recent.current, recent.before):
                place, match = index.find(last)
                if match > (0 if best is None else best.match):
                    best = _Followed(index.tokens, place, match, "recent")
        return best

    def _keep(self, sequence: Sequence) -> None:
        scope = sequence.draft_scope
        recent = self._recent.setdefault(scope, _Recent())
        self._recent.move_to_end(scope)
        recent.add(sequence.tokens[sequence.prompt_length :])
        if len(self._recent) > RECENT_SCOPES:
            self._recent.popitem(last=False)
