"""OrderTiming: when to send orders to a replica that is in the middle of a step.

Orders take effect at the next step boundary however early they are sent, and a boundary applies one set of orders. If
orders were sent at once, the first of several new requests would take the boundary for itself, and the others would wait a
whole step more. So orders are held until half of the shortest recent step is over.
"""

from __future__ import annotations

HOLD_SHARE = 0.5
"""Share of a step for which orders are held; the rest is for their way to the replica."""
MIN_STEP_S = 0.004
"""Orders are not held in shorter steps."""


class OrderTiming:
    """The last step durations of one replica, in seconds of a monotonic clock."""

    __slots__ = ("_boundary", "_durations", "_stepping")

    def __init__(self) -> None:
        self._boundary = 0.0
        self._durations = (0.0, 0.0)
        self._stepping = False

    def update(self, now: float, step_s: float, *, stepping: bool) -> None:
        """Record that a step of `step_s` ended at `now`; `stepping`: the next one began."""
        self._boundary = now
        self._durations = (self._durations[1], step_s)
        self._stepping = stepping

    def hold(self, now: float) -> float:
        """Return the seconds to hold orders; 0 if they should be sent now."""
        step_s = min(self._durations)
        if not self._stepping or step_s < MIN_STEP_S:
            return 0.0
        return max(0.0, self._boundary + HOLD_SHARE * step_s - now)
