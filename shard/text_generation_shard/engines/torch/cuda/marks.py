"""Moments in the device's work: to wait for, and to tell the time between."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Mark(Protocol):
    """A moment that comes when the device has done all it was given before."""

    def wait(self) -> None:
        """Return once it has come. Other threads run meanwhile."""

    def ns_since(self, earlier: Mark) -> int:
        """Nanoseconds between two moments that have come."""


class CudaMark:
    """An event on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """It is the moment after everything launched so far."""
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def ns_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, CudaMark)
        return int(earlier._event.elapsed_time(self._event) * 1e6)


class CpuMark:
    """A CPU has done its work when it comes to the mark."""

    def __init__(self) -> None:
        self._at = time.perf_counter_ns()

    def wait(self) -> None:
        """Nothing to wait for."""

    def ns_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, CpuMark)
        return self._at - earlier._at


class Marks:
    """Marks of a device's work. A GPU's take turns: one is set again IN_USE marks later."""

    IN_USE = 16
    """More than are looked at: those of the steps under way, and of the one before them."""

    def __init__(self, device: torch.device) -> None:
        self._events = [CudaMark() for _ in range(self.IN_USE)] if device.type == "cuda" else []
        self._turn = 0

    def set(self) -> Mark:
        """The moment after everything given to the device so far."""
        if not self._events:
            return CpuMark()
        self._turn = (self._turn + 1) % self.IN_USE
        event = self._events[self._turn]
        event.set()
        return event
