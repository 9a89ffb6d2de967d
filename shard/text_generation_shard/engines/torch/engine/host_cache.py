"""The host cache of one rank: blocks in memory that the launcher holds, and the copies between them and the device.

The memory outlives the shard, and shards of several replicas may share it. It holds the blocks of the first group, of the second one
and so on, then a checksum of each block, which the device computes. The router decides what is where, so nothing else is kept here.
The checksum of a block contains the tag of its store: another block, one of another store or one that was written only in part is
found as well. A store locks its blocks in the file: where the store of a shard whose router has ended is late, that of another shard
fails.

A thread makes the loads and another one the stores. On a GPU each has a stream, which waits for the steps launched before. The router
waits for the end of a copy before it uses the blocks otherwise, so steps need not.
"""

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, lockf
from itertools import accumulate, chain
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from text_generation_common.log import log
from text_generation_common.progress import phase
from text_generation_proto.copies import CopiedBlocks, Copy, CopyEnd
from text_generation_shard.engine import EngineError

CHECK_BYTES = 4
"""Bytes of a checksum."""
CHUNK_BYTES = 32 << 20
"""Size of the buffer of copies on a CPU, if a block is not larger."""
WORD = torch.int64
"""The numbers in which the device copies."""
FACTOR = 0x1E3779B97F4A7C15
"""An odd number without a pattern of bits: 2^64 over the golden ratio, without its highest bit."""


class HostCopies:
    """The blocks of one rank, and the copies under way."""

    def __init__(self, descriptor: int, start: int, size: int, device: torch.device) -> None:
        """Map `size` bytes of a file from `start` on. Raises EngineError."""
        self.size = size
        self._file, self._start = descriptor, start
        self._device = device
        self._memory = np.frombuffer(mmap.mmap(descriptor, size, offset=start), dtype=np.uint8)
        self._threads = {
            is_load: ThreadPoolExecutor(1, f"host cache {name}")
            for is_load, name in ((True, "loads"), (False, "stores"))
        }
        self._streams: dict[bool, torch.cuda.Stream] = {}
        self._ended: deque[CopyEnd] = deque()
        self._groups: list[_Group] = []
        if device.type == "cuda":
            self._streams = {is_load: torch.cuda.Stream(device) for is_load in self._threads}  # type: ignore[no-untyped-call]
            with phase("pinning the memory of the host cache"):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                error = runtime.cudaHostRegister(self._memory.ctypes.data, size, 0)
            if int(error):
                raise EngineError(
                    f"the {size / 2**30:.1f} GiB of the host cache cannot be pinned: CUDA error {int(error)}"
                )

    def allocate(self, host_blocks: Sequence[int], parts: Sequence[Sequence[Tensor]]) -> None:
        """Divide the memory into so many blocks of each group. What it holds stays.

        `parts` of a group: uint8 [blocks, bytes] views of the device's cache, which together are its blocks.
        """
        self.wait()
        checks = self._memory[self.size - CHECK_BYTES * sum(host_blocks) :].view(np.int32)
        start, first = 0, 0
        self._groups = []
        for number, views in zip(host_blocks, parts, strict=True):
            width = sum(view.shape[1] for view in views)
            rows = self._memory[start : start + number * width].reshape(number, width)
            self._groups.append(_Group(rows, checks[first : first + number], views))
            start, first = start + number * width, first + number
        assert start + CHECK_BYTES * first <= self.size, "the blocks fit in the memory"

    def begin(self, copy: Copy, on_end: Callable[[], None]) -> None:
        """Begin a copy after the work launched so far. `on_end` is called on a thread."""
        launched = torch.cuda.Event() if self._streams else None  # type: ignore[no-untyped-call]
        if launched is not None:
            launched.record()
        self._threads[copy.is_load].submit(self._copy, copy, launched, on_end)

    def take_ended(self) -> list[CopyEnd]:
        """Return the copies that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def wait(self) -> None:
        """Wait for all copies under way, and forget their ends."""
        for thread in self._threads.values():
            thread.submit(lambda: None).result()
        self._ended.clear()

    def close(self) -> None:
        """Wait for the copies, and unpin the memory."""
        self.wait()
        for thread in self._threads.values():
            thread.shutdown()
        if self._device.type == "cuda":
            torch.cuda.cudart().cudaHostUnregister(self._memory.ctypes.data)  # type: ignore[no-untyped-call]

    def _copy(self, copy: Copy, launched: torch.cuda.Event | None, on_end: Callable[[], None]) -> None:
        failed: Iterable[int] = range(copy.num_blocks)
        try:
            self._check(copy)
            lock = nullcontext() if copy.is_load else self._locked(copy)
            with lock, torch.inference_mode(), self._after(launched, is_load=copy.is_load):
                groups = zip(self._groups, copy.groups, strict=False)
                good = [self._good(group, blocks, is_load=copy.is_load) for group, blocks in groups]
                failed = [index for index, each in enumerate(chain.from_iterable(good)) if not each]
                if failed:
                    log.error("blocks of the host cache have a wrong checksum", blocks=len(failed))
        except BlockingIOError:
            log.warning(
                "blocks are not stored in the host cache: another shard still stores them", blocks=copy.num_blocks
            )
        except Exception:
            log.exception("a copy of the host cache failed")
        self._ended.append(CopyEnd(copy.number, tuple(failed)))
        on_end()

    @contextmanager
    def _after(self, launched: torch.cuda.Event | None, *, is_load: bool) -> Iterator[None]:
        """Launch work on a stream that waits for an event; None: on a CPU."""
        if launched is None:
            yield
            return
        stream = self._streams[is_load]
        stream.wait_event(launched)
        with torch.cuda.stream(stream):
            yield

    def _check(self, copy: Copy) -> None:
        """Raise ValueError if the copy has blocks that do not exist."""
        if len(copy.groups) > len(self._groups):
            raise ValueError("there are not so many groups of blocks")
        for group, blocks in zip(self._groups, copy.groups, strict=False):
            if not len(blocks.device) == len(blocks.host) == len(blocks.tags):
                raise ValueError("the columns of blocks differ in length")
            if max(blocks.host, default=-1) >= len(group.rows) or max(blocks.device, default=-1) >= group.num_blocks:
                raise ValueError("a block does not exist")

    @contextmanager
    def _locked(self, copy: Copy) -> Iterator[None]:
        """Lock the blocks of a store by the places of their checksums. Raises BlockingIOError if another process has one."""
        first = self._start + self.size - CHECK_BYTES * sum(len(group.checks) for group in self._groups)
        try:
            for group, blocks in zip(self._groups, copy.groups, strict=False):
                for block in blocks.host:
                    lockf(self._file, LOCK_EX | LOCK_NB, CHECK_BYTES, first + CHECK_BYTES * block)
                first += CHECK_BYTES * len(group.checks)
            yield
        finally:
            lockf(self._file, LOCK_UN, self.size, self._start)

    def _good(self, group: "_Group", blocks: CopiedBlocks, *, is_load: bool) -> list[bool]:
        """Copy blocks of a group; return True for those that are as they were stored."""
        # A shard whose router ended may have written the rows of a load until these sums are there.
        sums = group.copy(blocks, is_load=is_load)
        if not is_load:
            group.checks[list(blocks.host)] = sums
        return [bool(group.checks[block] == each) for block, each in zip(blocks.host, sums, strict=True)]


class _Copies(Protocol):
    def copy(self, device: Tensor, host: Tensor, *, is_load: bool) -> Tensor:
        """See `BlockCopies`."""


class _Group:
    """The blocks of a group: rows of the host's memory, and parts on the device."""

    def __init__(self, rows: NDArray[np.uint8], checks: NDArray[np.int32], parts: Sequence[Tensor]) -> None:
        self.rows, self.checks = rows, checks
        self.num_blocks = len(parts[0]) if parts else 1 << 30
        # Whole words where that is possible: each number is copied by itself. A group without layers has no bytes.
        sizes = rows.ctypes.data, *(part.shape[1] for part in parts)
        dtype = WORD if parts and not any(size % WORD.itemsize for size in sizes) else torch.uint8
        host, words = torch.from_numpy(rows).view(dtype), [part.view(dtype) for part in parts]
        places = torch.arange(1, host.shape[1] + 1, device=parts[0].device if parts else None)
        factors = (2 * places + 1) * FACTOR
        self._is_pinned = factors.is_cuda
        self._copies: _Copies
        if self._is_pinned:
            # Imported here: Triton need not be installed for CPUs.
            from text_generation_shard.engines.torch.kernels.host_copy import BlockCopies

            self._copies = BlockCopies(host, words, factors)
            for is_load in (False, True):  # compiles it before there are steps
                self.copy(CopiedBlocks((), (), ()), is_load=is_load)
        else:
            self._copies = _PlainCopies(host, words, factors)

    def copy(self, blocks: CopiedBlocks, *, is_load: bool) -> list[int]:
        """Copy blocks; return their checksums.

        The checksum is Σ word · (2 · place + 1) · FACTOR over the words of a block, its tag at place 0, of 64 bits, folded.
        """
        device, host = (
            torch.tensor(column, dtype=torch.int64, pin_memory=self._is_pinned)
            for column in (blocks.device, blocks.host)
        )
        sums = self._copies.copy(device, host, is_load=is_load)
        sums += torch.tensor(blocks.tags, dtype=torch.int64) * FACTOR
        checks: list[int] = (sums >> 32).to(torch.int32).tolist()
        return checks


class _PlainCopies:
    """Copies on a CPU; as `BlockCopies`."""

    def __init__(self, host: Tensor, parts: Sequence[Tensor], factors: Tensor) -> None:
        self._host, self._factors = host, factors
        ends = accumulate(part.shape[1] for part in parts)
        self._parts = [(part, slice(end - part.shape[1], end)) for part, end in zip(parts, ends, strict=True)]
        self._most = max(1, CHUNK_BYTES // max(1, host.shape[1] * host.itemsize))

    def copy(self, device: Tensor, host: Tensor, *, is_load: bool) -> Tensor:
        chunks = zip(*(torch.split(blocks, self._most) for blocks in (device, host)), strict=True)
        return torch.cat([self._copied(*chunk, is_load=is_load) for chunk in chunks])

    def _copied(self, device: Tensor, host: Tensor, *, is_load: bool) -> Tensor:
        if is_load:
            buffer = self._host[host]
            for part, columns in self._parts:
                part.index_copy_(0, device, buffer[:, columns])
        else:
            buffer = self._host.new_empty(len(device), self._host.shape[1])
            for part, columns in self._parts:
                torch.index_select(part, 0, device, out=buffer[:, columns])
            self._host.index_copy_(0, host, buffer)
        return (buffer * self._factors).sum(1, dtype=torch.int64)
