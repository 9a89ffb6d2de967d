"""Copies weights from mapped files to where they are used; to a GPU by way of pinned memory, with several readers.

A plain copy from a mapped file to a GPU is staged by the driver, one page fault at a time. Here several threads read files
into small pinned buffers and leave the copies to the GPU, each on a stream of its own. Host memory stays flat: what is
mapped is the page cache, what is allocated are the buffers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

MAX_READERS = 8
"""Threads that read for a GPU; one copies 2 to 4 GB/s out of the page cache."""
STAGING_BYTES = 8 << 20
"""Of one pinned buffer; each reader has two, so that one is filled while the other is copied."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy, source to target of the same shape; the target's dtype is what counts."""

    source: Tensor
    target: Tensor
    row_scales: Tensor | None = None
    """[rows, 1], float32: each row of the source is multiplied by its own."""

    def write(self, target: Tensor, *, one_thread: bool = False) -> None:
        """The source in the dtype of `target`, which is in host memory and has the target's shape."""
        if self.row_scales is not None:
            target.copy_(self.source.float().mul_(self.row_scales))
        elif one_thread and self.source.dtype == target.dtype:
            # torch's copy would have each of our threads keep a team of all cores busy.
            np.copyto(target.view(torch.uint8).numpy(), self.source.view(torch.uint8).numpy())
        else:
            target.copy_(self.source)

    def pieces(self, max_bytes: int) -> Iterator[Transfer]:
        """The same copy in pieces, whole rows of at most `max_bytes` in the target (but one row at the least)."""
        rows = self.target.shape[0]
        step = max(1, max_bytes * rows // max(1, self.target.nbytes))
        for start in range(0, rows, step):
            piece = slice(start, start + step)
            scales = None if self.row_scales is None else self.row_scales[piece]
            yield Transfer(self.source[piece], self.target[piece], scales)


def copy_all(transfers: Sequence[Transfer]) -> Iterator[int]:
    """Copy everything; yields the bytes of the source of each transfer once it is on its way, and ends when all is there.

    All targets are on one device.
    """
    if not transfers:
        return
    device = transfers[0].target.device
    if device.type == "cpu":
        # One after another: torch copies with all cores as it is.
        for transfer in transfers:
            transfer.write(transfer.target)
            yield transfer.source.nbytes
        return
    lanes = [PinnedLane(device) for _ in range(min(MAX_READERS, len(os.sched_getaffinity(0))))]
    yield from copy_through(lanes, transfers)


class Lane(Protocol):
    """A reader's way to the device, for one thread at a time."""

    def copy(self, transfer: Transfer) -> None: ...

    def wait(self) -> None:
        """Return when all that was copied is there."""


def copy_through(lanes: Sequence[Lane], transfers: Sequence[Transfer]) -> Iterator[int]:
    """Copy with a thread a lane; yields as `copy_all`. The first error ends it: nothing new is begun."""
    free: SimpleQueue[Lane] = SimpleQueue()
    for lane in lanes:
        free.put(lane)

    @torch.inference_mode()  # a thread's own setting: only in it may tensors made in it be written
    def copy(transfer: Transfer) -> int:
        lane = free.get()
        try:
            lane.copy(transfer)
        finally:
            free.put(lane)
        return transfer.source.nbytes

    try:
        with ThreadPoolExecutor(len(lanes), thread_name_prefix="weights") as readers:
            yield from readers.map(copy, transfers)
    finally:
        for lane in lanes:
            lane.wait()


class PinnedLane:
    """To a GPU: two pinned buffers, filled in turn, and a stream."""

    def __init__(self, device: torch.device) -> None:
        # Pinning uses the current device, and would start up another one than ours.
        with torch.cuda.device(device):
            self._buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The targets' memory may still be in use by what was launched before they were allocated.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def copy(self, transfer: Transfer) -> None:
        for piece in transfer.pieces(STAGING_BYTES):
            self._turn ^= 1
            copied = self._copied[self._turn]
            copied.synchronize()
            staged = self._staged(piece.target)
            piece.write(staged, one_thread=True)
            with torch.cuda.stream(self._stream):
                piece.target.copy_(staged, non_blocking=True)
                copied.record(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()

    def _staged(self, like: Tensor) -> Tensor:
        return self._buffers[self._turn][: like.nbytes].view(like.dtype).view(like.shape)
