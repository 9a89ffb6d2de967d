"""Copies between host and device without waiting, and events in the work of a device.

A copy between pageable memory and a GPU blocks Python until the stream has done everything launched before it. Here copies go
through pinned memory and are only launched, on the current stream. torch's allocator of pinned memory records an event at each
such copy and reuses a block only after the stream has passed it, so the source need not be kept.
"""

import time
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_BUFFERS = 3
"""A buffer is free when its step is over, and at most two steps are in flight."""


ASSUMED_CAPABILITY = (9, 0)
"""The compute capability of a GPU that is planned for and not there: Hopper."""


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU. The meta device stands for the GPU here, or one with ASSUMED_CAPABILITY."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else ASSUMED_CAPABILITY


def upload(values: Sequence[float] | NDArray[np.int64], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [len(values)] on the device. `dtype` must exist in numpy, which reads a list in half of torch's time."""
    host = torch.empty(len(values), dtype=dtype, pin_memory=device.type == "cuda")
    host.numpy()[:] = values
    return host.to(device, non_blocking=True)


def upload_rows(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return [len(rows), n] on the device, from host tensors [n] of one dtype."""
    host = torch.empty(len(rows), *rows[0].shape, dtype=rows[0].dtype, pin_memory=device.type == "cuda")
    torch.stack(list(rows), out=host)
    return host.to(device, non_blocking=True)


def pinned_ints(length: int, device: torch.device) -> NDArray[np.int32]:
    """Allocate host memory of int32 numbers, pinned if the device is a GPU."""
    numbers: NDArray[np.int32] = torch.empty(length, dtype=torch.int32, pin_memory=device.type == "cuda").numpy()
    return numbers


def select_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of `values` on its device, without waiting for it: a view if they are the first ones."""
    if [*rows] == [*range(len(rows))]:
        return values[: len(rows)]
    return values.index_select(0, upload(rows, torch.int64, values.device))


def download(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, valid once the stream has passed this point; the tensor itself if it is not on a GPU."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class PinnedBuffers:
    """A ring of pinned int32 buffers, each reused when its copies have finished."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * NUM_BUFFERS
        self._views = [torch.empty(0, dtype=torch.int32)] * NUM_BUFFERS
        """The view of each buffer that was taken last: consecutive steps often have the same size."""
        self._index = 0

    def take(self, length: int) -> Tensor:
        """Return `length` elements of the next buffer."""
        self._index = (self._index + 1) % NUM_BUFFERS
        if self._views[self._index].numel() == length:
            return self._views[self._index]
        if self._buffers[self._index].numel() < length:
            # Twice the need: a pinned allocation stops the device.
            self._buffers[self._index] = torch.empty(2 * length, dtype=torch.int32, pin_memory=self._pin)
        self._views[self._index] = self._buffers[self._index][:length]
        return self._views[self._index]


class DeviceEvent:
    """An event on the current stream of a GPU, complete when the device has finished all work launched before it; on a CPU at once."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._event = torch.cuda.Event(enable_timing=True) if on_cuda else None  # type: ignore[no-untyped-call]
        self._at = 0
        """Time of the record on a CPU, in nanoseconds."""

    def record(self) -> None:
        if self._event is None:
            self._at = time.perf_counter_ns()
        else:
            self._event.record()

    def wait(self) -> None:
        """Wait until the event has completed. Releases the GIL."""
        if self._event is not None:
            self._event.synchronize()

    def ns_since(self, earlier: Self) -> int:
        """Return the nanoseconds between two completed events."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return int(earlier._event.elapsed_time(self._event) * 1e6)


class EventRecorder:
    """Records events of a device. They are reused: one is recorded again RING_SIZE events later."""

    RING_SIZE = 16
    """More than are in use: those of the steps in flight and of the one before them."""

    def __init__(self, device: torch.device) -> None:
        self._events = [DeviceEvent(device) for _ in range(self.RING_SIZE)]
        self._index = 0

    def record(self) -> DeviceEvent:
        self._index = (self._index + 1) % self.RING_SIZE
        event = self._events[self._index]
        event.record()
        return event
