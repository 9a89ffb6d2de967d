"""Events in the work of a device: to wait for, and to measure the time between them."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """An event that completes when the device has finished all work launched before it."""

    def wait(self) -> None:
        """Wait until the event has completed. Releases the GIL."""

    def ns_since(self, earlier: DeviceEvent) -> int:
        """Return the nanoseconds between two completed events."""


class CudaEvent:
    """A CUDA event on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Record the event after everything launched so far."""
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def ns_since(self, earlier: DeviceEvent) -> int:
        assert isinstance(earlier, CudaEvent)
        return int(earlier._event.elapsed_time(self._event) * 1e6)


class CpuEvent:
    """An event on a CPU, where work is complete when the event is created."""

    def __init__(self) -> None:
        self._at = time.perf_counter_ns()

    def wait(self) -> None:
        """Nothing to wait for."""

    def ns_since(self, earlier: DeviceEvent) -> int:
        assert isinstance(earlier, CpuEvent)
        return self._at - earlier._at


class EventRecorder:
    """Records events of a device. CUDA events are reused: one is recorded again RING_SIZE events later."""

    RING_SIZE = 16
    """More than are in use: those of the steps in flight and of the one before them."""

    def __init__(self, device: torch.device) -> None:
        self._events = [CudaEvent() for _ in range(self.RING_SIZE)] if device.type == "cuda" else []
        self._index = 0

    def record(self) -> DeviceEvent:
        """Record an event after all work launched so far."""
        if not self._events:
            return CpuEvent()
        self._index = (self._index + 1) % self.RING_SIZE
        event = self._events[self._index]
        event.record()
        return event
