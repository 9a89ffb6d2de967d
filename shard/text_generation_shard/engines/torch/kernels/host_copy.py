"""Copies of blocks between a device's cache and the host's memory, with their checksums.

Kernels copy, not the device's copy engines: the tokens of a step and its results pass those, and would wait for a transfer before
them, and for one that itself waits for a kernel. So the numbers of blocks and the sums are read and written in the host's memory,
too. A few programs use the whole bandwidth between device and host, and leave the multiprocessors to the steps.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

_STORE_PROGRAMS, _LOAD_PROGRAMS = 4, 7
"""On an H200 stores run at 46 GB/s with 4 and with 8, loads at 38, 43 and 46 with 6, 7 and 8. With 16, steps beside stores
take 1.2 times as long."""
_WORDS, _WARPS = 2048, 8
"""Words that a program copies at a time, and its warps."""


class BlockCopies:
    """Copies between rows of the host's memory and blocks on the device.

    `host` [blocks, words], pinned; `parts` [blocks, words] each, which together are the blocks of the device; `factors` of a word at
    each place.
    """

    def __init__(self, host: Tensor, parts: Sequence[Tensor], factors: Tensor) -> None:
        self._host, self._factors = host, factors
        self._parts = parts
        """Kept: their addresses are in the table."""
        widths = [part.shape[1] for part in parts]
        columns = [part.data_ptr() for part in parts], [part.stride(0) for part in parts], widths, [*accumulate(widths)]
        self._table = torch.tensor(columns, dtype=torch.int64, device=factors.device)
        """[4, parts]: address, distance of blocks, words of each part, and with those before."""

    def copy(self, device: Tensor, host: Tensor, *, is_load: bool) -> Tensor:
        """Copy blocks `device` and `host`, in the current stream; return the sums of their words times the factors, int64.

        Waits for the device. The arguments are in host memory, pinned if the device is a GPU, and so is the result.
        """
        on_gpu = self._factors.is_cuda
        sums = torch.empty(len(device), len(self._parts), dtype=torch.int64, pin_memory=on_gpu)
        _copy_kernel[(_LOAD_PROGRAMS if is_load else _STORE_PROGRAMS,)](
            self._host,
            self._table,
            self._factors,
            device,
            host,
            sums,
            sums.numel(),
            len(self._parts),
            self._host.stride(0),
            IS_LOAD=is_load,
            WORDS=_WORDS,
            num_warps=_WARPS,
        )
        if on_gpu:
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
            copied.synchronize()
        return sums.sum(1)


@triton.jit(do_not_specialize=["units", "parts"])
def _copy_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    host_words: tl.tensor,
    table: tl.tensor,
    factors: tl.tensor,
    device_blocks: tl.tensor,
    host_blocks: tl.tensor,
    sums: tl.tensor,
    units: int,
    parts: int,
    host_stride: int,
    IS_LOAD: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    places = tl.arange(0, WORDS)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        block, part = unit // parts, unit % parts
        address, stride = tl.load(table + part), tl.load(table + parts + part)
        width = tl.load(table + 2 * parts + part)
        first = tl.load(table + 3 * parts + part) - width
        on_device = address.to(tl.pointer_type(host_words.dtype.element_ty)) + tl.load(device_blocks + block) * stride
        on_host = host_words + tl.load(host_blocks + block) * host_stride + first
        total = tl.zeros([WORDS], tl.int64)
        for start in range(0, width, WORDS):
            place = start + places
            inside = place < width
            words = tl.load((on_host if IS_LOAD else on_device) + place, mask=inside, other=0)
            tl.store((on_device if IS_LOAD else on_host) + place, words, mask=inside)
            total += words.to(tl.int64) * tl.load(factors + first + place, mask=inside, other=0)
        tl.store(sums + unit, tl.sum(total, 0))
