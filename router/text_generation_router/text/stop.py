"""Stop strings, found anywhere in the text: across tokens, inside one, however long.

The match that *completes first* wins, so the outcome does not depend on how the text was cut into pieces. Two manners,
and this is the one place that knows the difference:

    keep   TGI: the stop string is the end of the text, and every piece leaves at once
    cut    OpenAI, Anthropic: the text ends before it, so what may still become one is held back – exactly the longest
           end of the text that is a beginning of some stop string
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one request's text for its stop strings."""

    __slots__ = ("_held", "_keep", "_longest", "_prefixes", "_stops", "_tail", "matched")

    def __init__(self, stops: Sequence[str], *, keep: bool = True) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._tail = ""
        """The end of the text so far, one character short of the longest stop: a match may begin in it."""
        self._prefixes = [] if keep else [_Prefix(stop) for stop in self._stops if stop]
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, piece: str) -> str:
        """The text that `piece` lets go. Once `matched` is set, the text is over.

        An empty stop string ends the text after the first piece, as in TGI.
        """
        window = self._tail + piece
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := window.find(stop)) >= 0 and stop]
        if ends:
            end, length, self.matched = min(ends)
            cut = end - len(self._tail) + (0 if self._keep else length)
            text = self._held + piece
            return text[: len(self._held) + cut]
        if "" in self._stops:
            self.matched = ""
            return piece
        self._tail = window[1 - self._longest :] if self._longest > 1 else ""
        if self._keep:
            return piece
        text = self._held + piece
        hold = max((prefix.advance(piece) for prefix in self._prefixes), default=0)
        released, self._held = (text[:-hold], text[-hold:]) if hold else (text, "")
        return released

    def flush(self) -> str:
        """What was held back: the text ended, and it was no stop string after all."""
        held, self._held = self._held, ""
        return held


class _Prefix:
    """How much of one stop string the text ends in (Knuth, Morris, Pratt 1977).

    The table grows no faster than the text, so that a stop string of a megabyte costs nothing before it is met.
    """

    __slots__ = ("_failure", "_matched", "_stop")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._failure = [0, 0]
        """_failure[n]: length of the longest proper prefix of stop[:n] that also ends it."""
        self._matched = 0

    def advance(self, piece: str) -> int:
        """Take `piece`, which completes no match; the length of the longest prefix that the text now ends in."""
        stop, failure, matched = self._stop, self._failure, self._matched
        for character in piece:
            while matched and stop[matched] != character:
                matched = failure[matched]
            if stop[matched] == character:
                matched += 1
                if matched == len(failure):
                    shorter = failure[matched - 1]
                    while shorter and stop[shorter] != stop[matched - 1]:
                        shorter = failure[shorter]
                    failure.append(shorter + (stop[shorter] == stop[matched - 1]))
        self._matched = matched
        return matched
