"""The limit of the log lines of refused requests.

Callers without a key must not be able to fill a disk.
"""

import asyncio
from collections import Counter

from text_generation_common.log import log

WINDOW_S = 10.0
"""Seconds over which log lines of refusals are counted."""
MAX_REFUSALS_LOGGED = 50
"""Log lines per window for refusals with the same status. Further ones are counted, in one line at the end of the window."""


class RefusalLimiter:
    """Decides which refusals are logged, and logs the number of the others."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._refused: Counter[int] = Counter()
        """By status, in the current window."""

    def admits(self, status: int) -> bool:
        """Count a response whose line has level info; return True if it is to be logged. Success always is."""
        if status < 400:
            return True
        if not self._refused:
            asyncio.get_running_loop().call_later(self._window_s, self._end_window)
        self._refused[status] += 1
        return self._refused[status] <= MAX_REFUSALS_LOGGED

    def _end_window(self) -> None:
        for status, refused in self._refused.items():
            if refused > MAX_REFUSALS_LOGGED:
                log.info("refusals not logged", status=status, requests=refused - MAX_REFUSALS_LOGGED)
        self._refused.clear()
