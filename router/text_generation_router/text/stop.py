"""Stop strings, found anywhere in the text: across tokens or inside one, of any length.

The match that *completes first* wins, so the result does not depend on how the text is cut into pieces. Two modes:

    keep   TGI: the text ends with the stop string, and every piece is released at once
    cut    OpenAI, Anthropic: the text ends before the stop string. Text that may become one is held back: exactly the
           longest end of the text that is a prefix of a stop string
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop strings in the text of one request."""

    __slots__ = ("_held", "_keep", "_longest", "_prefixes", "_stops", "_tail", "matched")

    def __init__(self, stops: Sequence[str], *, keep: bool = True) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._tail = ""
        """The end of the text so far, one character shorter than the longest stop: a match may start in it."""
        self._prefixes = [] if keep else [_Prefix(stop) for stop in self._stops if stop]
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, piece: str) -> str:
        """Return the text that `piece` releases. Once `matched` is set, the text has ended.

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
        """Return the text that was held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        return held


class _Prefix:
    """The longest prefix of one stop string that the text ends with (Knuth, Morris, Pratt 1977).

    The table grows with the matched text, so a stop string of a megabyte costs nothing until it occurs.
    """

    __slots__ = ("_failure", "_matched", "_stop")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._failure = [0, 0]
        """_failure[n]: length of the longest proper prefix of stop[:n] that is also a suffix of it."""
        self._matched = 0

    def advance(self, piece: str) -> int:
        """Read `piece`, which completes no match; return the length of the longest prefix that the text now ends with."""
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
