"""Progress of slow work at a start: a line that changes on a terminal, log records every few seconds elsewhere.

The launcher owns the terminal. A child that it tells so (logs.py) writes its state as lines that start with RELAYED among
those of its log; the launcher shows the last one of each child below the log. Work that ends soon reports nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from text_generation_common.log import log

RELAYED = "\x1eprogress "
"""Start of a line with a state for the launcher. An empty state removes the last one."""
LOG_S = 5.0
"""Seconds between two log records."""
SHOWN_AFTER_S, SHOWN_S = 0.5, 0.2
"""Seconds before the first state on a terminal, and between two."""


finished_work: dict[str, float] = {}
"""Seconds of the work that this process has finished, by its name."""

Display = Callable[[str], None]
_displays: list[Display] = []
"""The display of this process; empty: progress goes to the log."""


def use_display(display: Display) -> None:
    """Show states by this function from now on; "" removes the last state."""
    _displays[:] = [display]


def show(state: str) -> None:
    """Show a state on the display, if there is one."""
    if _displays:
        _displays[0](state)


class WorkProgress:
    """The progress of work with a known size, in bytes or in a number of steps."""

    def __init__(
        self, work: str, total: int, *, in_bytes: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._work = work
        self.total = total
        """May grow."""
        self._in_bytes = in_bytes
        self._clock = clock
        self._started = clock()
        self._told = self._started + (SHOWN_AFTER_S - SHOWN_S if _displays else 0.0)
        self.done = 0

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def add(self, amount: int = 1) -> None:
        self.done += amount
        now = self._clock()
        if self.done >= self.total or now - self._told < (SHOWN_S if _displays else LOG_S):
            return
        self._told = now
        left = round((now - self._started) * (self.total - self.done) / self.done) if self.done else None
        percent = 100 * self.done // self.total
        done, total = (gib(self.done), gib(self.total)) if self._in_bytes else (self.done, self.total)
        if _displays:
            estimate = "" if left is None else f", {left} s left"
            show(f"{self._work} {percent} % ({done} of {total}{' GiB' if self._in_bytes else ''}{estimate})")
        else:
            names = ("gib", "of_gib") if self._in_bytes else ("done", "of")
            log.info(self._work, **dict(zip(names, (done, total), strict=True)), percent=percent, seconds_left=left)

    def end(self) -> None:
        """Remove the state from the terminal."""
        _finish(self._work, self.seconds)
        show("")


@contextmanager
def phase(work: str) -> Iterator[None]:
    """Show work of unknown size while it lasts; in the log, if it lasts for more than LOG_S seconds."""
    started = time.monotonic()
    delayed = Timer(SHOWN_AFTER_S, _displays[0], (work,)) if _displays else Timer(LOG_S, log.info, (work,))
    delayed.daemon = True
    delayed.start()
    try:
        yield
    finally:
        delayed.cancel()
        delayed.join()
        show("")
        _finish(work, time.monotonic() - started)
        if not _displays and time.monotonic() - started >= LOG_S:
            log.info("done", work=work, seconds=round(time.monotonic() - started, 1))


def _finish(work: str, seconds: float) -> None:
    finished_work[work] = finished_work.get(work, 0.0) + seconds


def gib(size: int) -> float:
    """Return a number of bytes in GiB, with two digits."""
    return round(size / 2**30, 2)
