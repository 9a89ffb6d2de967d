"""Stop strings, found in a sequence's text and told in tokens: which of them may leave, and where the sequence ends.

Tokens that complete no character go with the one that does: together they are a *piece*, with a half-open interval of the
text. Held back is every piece that reaches into the longest end of the text which may still become a stop string; so what
has left never has to be taken back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [first, last) of the sequence spell text [start, end)."""

    first: int
    last: int
    start: int
    end: int


class StopWatch:
    """Watches one sequence. The match that completes first wins; of several that do, the longest."""

    __slots__ = (
        "_from",
        "_held",
        "_keep",
        "_length",
        "_matchers",
        "_pieced",
        "_spell",
        "_tokens",
        "leaving",
        "matched",
    )

    def __init__(self, stops: Sequence[str], spell: Callable[[int], str], *, keep: bool, min_tokens: int = 0) -> None:
        """`spell` gives the text each token completes. With `keep` the stop string stays. None counts that is complete
        with the first `min_tokens` tokens."""
        self._spell = spell
        self._keep = keep
        self._from = min_tokens
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held: deque[_Piece] = deque()
        self._tokens = 0
        self._pieced = 0
        """Tokens that are in a piece."""
        self._length = 0
        """Characters of the text."""
        self.leaving = 0
        """How many tokens may leave, from the first one on. Once `matched` is set: how many the sequence has."""
        self.matched: str | None = None

    def feed(self, token_id: int) -> None:
        """Take the next token. None may follow once `matched` is set."""
        text = self._spell(token_id)
        self._tokens += 1
        if not text:
            return
        start, self._length = self._length, self._length + len(text)
        self._held.append(_Piece(self._pieced, self._tokens, start, self._length))
        self._pieced = self._tokens
        if (found := self._search(start, text)) is not None:
            self._end(found)
            return
        certain = self._length - max(matcher.matched for matcher in self._matchers)
        while self._held and self._held[0].end <= certain:
            self.leaving = self._held.popleft().last

    def _search(self, start: int, text: str) -> int | None:
        """Where in the text the stop string begins that `text` completes; None if it completes none."""
        for end, character in enumerate(text, start + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
            if complete and self._tokens > self._from:
                self.matched = max(complete, key=len)
                return end - len(self.matched)
        return None

    def _end(self, begins_at: int) -> None:
        """Cut the stop string off where it begins with a token. Cutting inside one would take away what was before it."""
        cut = None if self._keep else next((piece.first for piece in self._held if piece.start == begins_at), None)
        self.leaving = self._tokens if cut is None else cut


class _Matcher:
    """How much of one stop string the text ends in (Knuth, Morris, Pratt 1977)."""

    __slots__ = ("_failure", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Characters, fewer than the stop string has."""
        self._failure = [0, 0]
        """_failure[n]: length of the longest proper prefix of stop[:n] that also ends it."""
        shorter = 0
        for character in stop[1:]:
            while shorter and stop[shorter] != character:
                shorter = self._failure[shorter]
            shorter += stop[shorter] == character
            self._failure.append(shorter)

    def advance(self, character: str) -> bool:
        """Take one character; whether it completes the stop string."""
        stop, matched = self.stop, self.matched
        while matched and stop[matched] != character:
            matched = self._failure[matched]
        matched += stop[matched] == character
        complete = matched == len(stop)
        self.matched = self._failure[matched] if complete else matched
        return complete
