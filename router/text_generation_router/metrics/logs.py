"""The metric of log lines that were not written, read when scraped."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from text_generation_proto.logs import dropped_lines
from text_generation_router.metrics.instruments import reading_text


class DroppedLogLines:
    """Log lines that launcher, router and shards dropped; an Instrument."""

    def __init__(self, others_fd: int) -> None:
        """`others_fd` is an eventfd to which launcher and shards add their dropped lines; -1: there is none."""
        self._others_fd = others_fd
        self._by_others = 0

    def text(self) -> str:
        if sys.platform == "linux" and self._others_fd >= 0:
            with suppress(BlockingIOError):  # 0 since the last scrape
                self._by_others += os.eventfd_read(self._others_fd)
        return reading_text(
            "text_generation_log_lines_dropped_total",
            "Log lines that launcher, router or shards dropped because the log was full, closed or too slow",
            "counter",
            dropped_lines() + self._by_others,
        )
