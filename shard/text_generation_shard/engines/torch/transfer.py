"""Copies weights from mapped files to the device; to a GPU through pinned memory, with several reader threads.

The driver stages a plain copy from a mapped file to a GPU, one page fault at a time. Here several threads read the files into
small pinned buffers and start asynchronous copies, each thread on its own stream. Host memory stays flat: mapped pages belong
to the page cache, only the buffers are allocated.
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
"""Reader threads for a GPU; one copies 2 to 4 GB/s out of the page cache."""
BUFFER_BYTES = 8 << 20
"""Size of a pinned buffer; each reader has two, one being filled while the other is copied."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy from source to target of the same shape, converted to the dtype of the target."""

    source: Tensor
    target: Tensor
    row_scales: Tensor | None = None
    """[rows, 1], float32: factors for the rows of the source."""

    def write(self, target: Tensor, *, one_thread: bool = False) -> None:
        """Write the converted source to `target`, which is in host memory and has the target's shape and dtype."""
        if self.row_scales is not None:
            target.copy_(self.source.float().mul_(self.row_scales))
        elif one_thread and self.source.dtype == target.dtype:
            # torch's copy would start a thread pool over all cores in each reader thread.
            np.copyto(target.view(torch.uint8).numpy(), self.source.view(torch.uint8).numpy())
        else:
            target.copy_(self.source)

    def chunks(self, max_bytes: int) -> Iterator[Transfer]:
        """Split the copy into chunks of whole rows, at most `max_bytes` of the target each, but at least one row."""
        rows = self.target.shape[0]
        step = max(1, max_bytes * rows // max(1, self.target.nbytes))
        for start in range(0, rows, step):
            chunk = slice(start, start + step)
            scales = None if self.row_scales is None else self.row_scales[chunk]
            yield Transfer(self.source[chunk], self.target[chunk], scales)


def copy_all(transfers: Sequence[Transfer]) -> Iterator[int]:
    """Copy everything. Yields the source bytes of each transfer once its copy has started; returns when all are complete.

    All targets are on one device.
    """
    if not transfers:
        return
    device = transfers[0].target.device
    if device.type == "cpu":
        # One after another: torch's copy uses all cores.
        for transfer in transfers:
            transfer.write(transfer.target)
            yield transfer.source.nbytes
        return
    copiers = [PinnedCopier(device) for _ in range(min(MAX_READERS, len(os.sched_getaffinity(0))))]
    yield from copy_through(copiers, transfers)


class Copier(Protocol):
    """Copies to the device, for one thread at a time."""

    def copy(self, transfer: Transfer) -> None: ...

    def wait(self) -> None:
        """Wait until all copies are complete."""


def copy_through(copiers: Sequence[Copier], transfers: Sequence[Transfer]) -> Iterator[int]:
    """Copy with one thread per copier; yields as `copy_all`. The first error stops it: no new copy is started."""
    free: SimpleQueue[Copier] = SimpleQueue()
    for copier in copiers:
        free.put(copier)

    @torch.inference_mode()  # per thread: tensors made in inference mode can only be written in it
    def copy(transfer: Transfer) -> int:
        copier = free.get()
        try:
            copier.copy(transfer)
        finally:
            free.put(copier)
        return transfer.source.nbytes

    try:
        with ThreadPoolExecutor(len(copiers), thread_name_prefix="weights") as readers:
            yield from readers.map(copy, transfers)
    finally:
        for copier in copiers:
            copier.wait()


class PinnedCopier:
    """Copies to a GPU through two alternating pinned buffers, on its own stream."""

    def __init__(self, device: torch.device) -> None:
        # Pinning initializes the current device, which may be another one.
        with torch.cuda.device(device):
            self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Work launched before the targets were allocated may still use their memory.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def copy(self, transfer: Transfer) -> None:
        for chunk in transfer.chunks(BUFFER_BYTES):
            self._turn ^= 1
            copied = self._copied[self._turn]
            copied.synchronize()
            staged = self._staged(chunk.target)
            chunk.write(staged, one_thread=True)
            with torch.cuda.stream(self._stream):
                chunk.target.copy_(staged, non_blocking=True)
                copied.record(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()

    def _staged(self, like: Tensor) -> Tensor:
        return self._buffers[self._turn][: like.nbytes].view(like.dtype).view(like.shape)
