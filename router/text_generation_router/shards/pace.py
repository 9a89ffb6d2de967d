"""Pace: when to send orders to a replica that is in the middle of a step.

Orders take effect at the next step boundary however early they are sent, and one set of orders is applied a boundary.
Sent at once, the first of several newcomers would take the boundary for itself and make the others wait a whole step
more. So orders leave late: once half of the step, as short as it may be, is over.
"""

from __future__ import annotations

HOLD_SHARE = 0.5
"""Share of a step for which orders are held back; the other half is for their way to the replica."""
SHORTEST_STEP_S = 0.004
"""Steps shorter than this are not worth waiting in."""


class Pace:
    """What is known of one replica's steps, in seconds of a monotonic clock."""

    __slots__ = ("_boundary", "_durations", "_stepping")

    def __init__(self) -> None:
        self._boundary = 0.0
        self._durations = (0.0, 0.0)
        self._stepping = False

    def report(self, now: float, step_s: float, *, stepping: bool) -> None:
        """A report came: a step of `step_s` ended at `now`; `stepping` says that the next one began."""
        self._boundary = now
        self._durations = (self._durations[1], step_s)
        self._stepping = stepping

    def hold(self, now: float) -> float:
        """Seconds to wait before orders should be sent; zero if they should go now."""
        step = min(self._durations)
        if not self._stepping or step < SHORTEST_STEP_S:
            return 0.0
        return max(0.0, self._boundary + HOLD_SHARE * step - now)
