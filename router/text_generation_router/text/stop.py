"""Stop strings, found anywhere in the text: across tokens or inside one, of any length.

The match that *completes first* wins, so the result does not depend on how the text is cut into pieces. Two modes:

    keep   TGI: the text ends with the stop string, and every piece is released at once
    cut    OpenAI, Anthropic: the text ends before the stop string. Text that may become one is held back: exactly the
           longest end of the text that is a prefix of a stop string
"""

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop strings in the text of one request."""

    __slots__ = ("_begun", "_keep", "_longest", "_stops", "_tail", "matched")

    def __init__(self, stops: Sequence[str], *, keep: bool = True) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._begun = {} if keep else dict.fromkeys(filter(None, self._stops), 0)
        """By stop string: the length of its longest prefix that the text ends with."""
        self._tail = ""
        """The end of the text, in which a match may have started: to keep, one character shorter than the longest stop; to cut,
        the part that is held back."""
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
            return window[len(self._tail) : end] if self._keep else window[: end + length]
        if "" in self._stops:
            self.matched = ""
            return piece
        if self._keep:
            self._tail = window[1 - self._longest :] if self._longest > 1 else ""
            return piece
        hold = 0
        for stop, begun in self._begun.items():
            if begun or stop[0] in piece:
                hold = max(hold, self._begin(stop, window, len(piece)))
        released = len(window) - hold
        self._tail = window[released:]
        return window[:released]

    def flush(self) -> str:
        """Return the text that was held back: the text ended without a stop string."""
        return "" if self._keep else self._tail

    def _begin(self, stop: str, window: str, new: int) -> int:
        """Return the length of the longest prefix of `stop` that `window` ends with, of which `new` characters are new."""
        # The prefix grows by the new characters at most, so no text has more places to try than characters.
        at = window.find(stop[0], len(window) - min(self._begun[stop] + new, len(stop) - 1))
        while at >= 0 and not stop.startswith(window[at:]):
            at = window.find(stop[0], at + 1)
        self._begun[stop] = length = len(window) - at if at >= 0 else 0
        return length
