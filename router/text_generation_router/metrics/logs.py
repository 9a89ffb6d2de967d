"""The metric of log lines that were not written, read when scraped."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from text_generation_proto.logs import dropped_lines
from text_generation_router.metrics.instruments import reading_text


class DroppedLogLines:
    """Log lines that router and launcher dropped; an Instrument."""

    def __init__(self, launcher_fd: int) -> None:
        """`launcher_fd` is an eventfd to which the launcher adds its dropped lines; -1: there is none."""
        self._launcher_fd = launcher_fd
        self._by_launcher = 0

    def text(self) -> str:
        if sys.platform == "linux" and self._launcher_fd >= 0:
            with suppress(BlockingIOError):  # 0 since the last scrape
                self._by_launcher += os.eventfd_read(self._launcher_fd)
        return reading_text(
            "text_generation_log_lines_dropped_total",
            "Log lines that router or launcher dropped because the log was full, closed or too slow",
            "counter",
            dropped_lines() + self._by_launcher,
        )
