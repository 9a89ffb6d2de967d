"""Pinned host buffers for asynchronous copies from and to the device, reused when the copies have finished."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BUFFERS = 3
"""A buffer is free when its step is over, and at most two steps are in flight."""


class PinnedBuffers:
    """A ring of int32 buffers."""

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
