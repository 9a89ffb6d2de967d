"""Sums over the GPUs of a group: the smallest by an exchange, small ones by reading all the others' memory, large ones by NCCL.

A decode step has two sums a layer, of a few hundred KiB at most. There NCCL's time is latency; a kernel in which each GPU
reads its peers' buffers over NVLink and adds up, "one-shot", takes a fraction of it. torch has it, over symmetric memory. It
reads size × bytes where NCCL's ring moves 2 × bytes: beyond SMALL NCCL is the faster one. Of a few KiB an exchange takes less
time still: it has no barrier, and the kernels around it can be chained; see kernels/exchange.py. But its bytes count twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from text_generation_shard.engines.torch.cuda.parallel.symmetric import all_succeed, share, symmetric

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.cuda.kernels.exchange import Exchange

SMALLEST = 64 * 1024
"""Bytes up to which a sum is exchanged: four rows of a wide model's residual stream."""
SMALL = 512 * 1024
"""Bytes up to which a sum is one-shot."""
SUMMED_AT_ONCE = (torch.float32, torch.bfloat16)
"""What torch's one-shot kernel is compiled for."""


class AllReduce:
    """In-place sums over the default process group. Making one is a collective: all ranks make theirs at the same time."""

    def __init__(self, device: torch.device, exchange: Exchange | None = None) -> None:
        """`device`: of the tensors that will come. Without CUDA, and where symmetric memory cannot be had, all is the group's."""
        self._exchange = exchange
        self._buffers: dict[torch.dtype, Tensor] = {}
        if device.type == "cuda":
            self._buffers = _set_up(device)

    @property
    def is_one_shot(self) -> bool:
        """Whether small sums are one-shot."""
        return bool(self._buffers)

    def __call__(self, tensor: Tensor) -> None:
        """Sum `tensor`, contiguous, over the ranks, in place, on the current stream. Can be captured in a CUDA graph."""
        if self._exchange is not None and tensor.nbytes <= SMALLEST and self._exchange.takes(tensor):
            self._exchange.sum(tensor)
            return
        buffer = self._buffers.get(tensor.dtype)
        if buffer is not None and tensor.numel() <= buffer.numel() and _is_aligned(tensor):
            _one_shot(tensor, buffer)
        else:
            dist.all_reduce(tensor)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether the one-shot kernel takes it: it moves four bytes at least, and wants both sides to begin alike."""
    return tensor.nbytes % 4 == 0 and tensor.storage_offset() * tensor.itemsize % 16 == 0


def _one_shot(tensor: Tensor, buffer: Tensor) -> None:
    """Copy to the symmetric `buffer`, wait for the peers, add theirs up into `tensor`, wait again: all in one kernel.

    The last wait is what lets the next sum use the same buffer. A thread writes only where it alone has read: the output may
    be the input.
    """
    flat = tensor.view(-1)
    assert dist.group.WORLD is not None
    torch.ops.symm_mem.one_shot_all_reduce_copy_out(
        buffer[: flat.numel()], flat, "sum", dist.group.WORLD.group_name, out=flat
    )


def _set_up(device: torch.device) -> dict[torch.dtype, Tensor]:
    """The symmetric buffer as each type that can be summed; empty if any rank cannot have it."""
    buffers: dict[torch.dtype, Tensor] = {}

    def allocate() -> None:
        memory = symmetric(SMALL, torch.uint8, device)
        buffers.update({dtype: memory.view(dtype) for dtype in SUMMED_AT_ONCE})

    def connect() -> None:
        share(buffers[torch.float32])

    def prove() -> None:
        # Both types before anything is said of either, as a rank that left early would leave its peers waiting.
        size, wrong = dist.get_world_size(), 0
        for buffer in buffers.values():
            tensor = torch.full((buffer.numel(),), float(dist.get_rank() + 1), dtype=buffer.dtype, device=device)
            _one_shot(tensor, buffer)
            wrong += not bool((tensor == size * (size + 1) / 2).all())
        if wrong:
            raise RuntimeError("a sum over symmetric memory came out wrong")

    if not all_succeed((allocate, connect, prove), device, "small sums are left to NCCL"):
        return {}
    return buffers
