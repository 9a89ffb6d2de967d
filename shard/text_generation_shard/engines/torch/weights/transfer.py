"""Copies weights from mapped files to the device; to a GPU through pinned memory, with several reader threads.

The driver stages a plain copy from a mapped file to a GPU, one page fault at a time. Here several threads read the files into
small pinned buffers and start asynchronous copies, each thread on its own stream. Host memory stays flat: mapped pages belong
to the page cache, only the buffers are allocated.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Self

import numpy as np
import torch
from torch import Tensor

MAX_READERS = 8
"""Reader threads for a GPU; one copies 2 to 4 GB/s out of the page cache."""
BUFFER_BYTES = 8 << 20
"""Size of a pinned buffer; each reader has two, one being filled while the other is copied. Also the size of a chunk on a CPU."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy to a target, converted to its dtype, of values that are read or computed row by row."""

    read: Callable[[slice], Tensor]
    """Returns a range of the rows of the target; called in any thread."""
    target: Tensor
    nbytes: int
    """Bytes of the checkpoint that are read."""
    first: int = 0
    """Number of the first row of the target."""

    @classmethod
    def of(cls, source: Tensor, target: Tensor) -> Self:
        """Return the copy of a tensor of the target's shape."""
        return cls(source.__getitem__, target, source.nbytes)

    def write(self, target: Tensor, *, one_thread: bool = False) -> None:
        """Write the values to `target`, which is in host memory and has the target's shape and dtype."""
        values = self.read(slice(self.first, self.first + target.shape[0]))
        if one_thread and values.dtype == target.dtype and values.stride(-1) == 1:
            # torch's copy would start a thread pool over all cores in each reader thread.
            np.copyto(target.view(torch.uint8).numpy(), values.view(torch.uint8).numpy())
        else:
            target.copy_(values)

    def chunks(self, max_bytes: int) -> Iterator[Self]:
        """Split the copy into chunks of whole rows, at most `max_bytes` of the target each, but at least one row."""
        rows = self.target.shape[0]
        step = max(1, max_bytes * rows // max(1, self.target.nbytes))
        for start in range(0, rows, step):
            chunk = self.target[start : start + step]
            yield replace(self, target=chunk, nbytes=self.nbytes * chunk.shape[0] // rows, first=self.first + start)


class PinnedCopier:
    """Copies to a GPU through two alternating pinned buffers, on its own stream; for one thread at a time."""

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
            target = chunk.target
            staged = self._buffers[self._turn][: target.nbytes].view(target.dtype).view(target.shape)
            chunk.write(staged, one_thread=True)
            with torch.cuda.stream(self._stream):
                target.copy_(staged, non_blocking=True)
                copied.record(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()


def copy_all(transfers: Sequence[Transfer]) -> Iterator[int]:
    """Copy everything to one device; yields the source bytes of each transfer once its copy has started, returns when all are complete."""
    if not transfers:
        return
    device = transfers[0].target.device
    if device.type == "cpu":
        # One after another: torch's copy uses all cores. In chunks, because computed values need memory.
        for transfer in transfers:
            for chunk in transfer.chunks(BUFFER_BYTES):
                chunk.write(chunk.target)
            yield transfer.nbytes
        return
    copiers = [PinnedCopier(device) for _ in range(min(MAX_READERS, len(os.sched_getaffinity(0))))]
    yield from copy_through(copiers, transfers)


def copy_through(copiers: Sequence[PinnedCopier], transfers: Sequence[Transfer]) -> Iterator[int]:
    """Copy with one thread per copier; yields as `copy_all`. The first error stops it: no new copy is started."""
    free: SimpleQueue[PinnedCopier] = SimpleQueue()
    for copier in copiers:
        free.put(copier)

    @torch.inference_mode()  # per thread: tensors made in inference mode can only be written in it
    def copy(transfer: Transfer) -> int:
        copier = free.get()
        try:
            copier.copy(transfer)
        finally:
            free.put(copier)
        return transfer.nbytes

    try:
        with ThreadPoolExecutor(len(copiers), thread_name_prefix="weights") as readers:
            yield from readers.map(copy, transfers)
    finally:
        for copier in copiers:
            copier.wait()
