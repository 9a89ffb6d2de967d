"""Stop strings, found anywhere in the text: across tokens, inside one, however long.

The match that *completes first* wins, so the outcome does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StopMatcher:
    """Watches one request's text for its stop strings."""

    stops: tuple[str, ...]
    _tail: str = ""
    """The end of the text so far, one character short of the longest stop: a match may begin in it."""
    _keep: int = field(init=False)

    def __post_init__(self) -> None:
        self._keep = max((len(stop) for stop in self.stops), default=1) - 1

    def cut(self, piece: str) -> int | None:
        """How much of `piece` belongs to the text, up to the end of the first stop string; None: no stop yet.

        An empty stop string ends the text after the first piece, as in TGI.
        """
        window = self._tail + piece
        end = min(
            (at + len(stop) for stop in self.stops if (at := window.find(stop)) >= 0 and stop),
            default=None,
        )
        if end is not None:
            return end - len(self._tail)
        if "" in self.stops:
            return len(piece)
        self._tail = window[-self._keep :] if self._keep else ""
        return None
