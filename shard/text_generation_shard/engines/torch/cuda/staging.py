"""Host memory that the device copies from and to while the host goes on: pinned, and used again only when that is over."""

from __future__ import annotations

import torch
from torch import Tensor

TURNS = 3
"""A step's memory is free again when the step is over, and at most two are under way at once."""


class Staging:
    """Buffers of int32 that take turns."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * TURNS
        self._taken = [torch.empty(0, dtype=torch.int32)] * TURNS
        """The part of each that was taken last: steps often need as many numbers as those before them."""
        self._turn = 0

    def take(self, length: int) -> Tensor:
        """So many numbers of the buffer whose turn it is."""
        self._turn = (self._turn + 1) % TURNS
        if self._taken[self._turn].numel() == length:
            return self._taken[self._turn]
        if self._buffers[self._turn].numel() < length:
            # Twice what is needed now: a pinned allocation stops the device.
            self._buffers[self._turn] = torch.empty(2 * length, dtype=torch.int32, pin_memory=self._pin)
        self._taken[self._turn] = self._buffers[self._turn][:length]
        return self._taken[self._turn]
