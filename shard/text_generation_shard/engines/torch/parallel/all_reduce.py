"""All-reduce over the GPUs of a group: low-latency for the smallest tensors, one-shot for small ones, NCCL for large ones.

A decode step has two all-reduces per layer, of a few hundred KiB at most. At these sizes NCCL is bound by latency. A one-shot
kernel, in which each GPU reads the buffers of its peers over NVLink and adds them, takes a fraction of that time; torch has it,
over symmetric memory. It reads size × bytes where NCCL's ring moves 2 × bytes, so NCCL is faster beyond
MAX_ONE_SHOT_BYTES. For a few KiB the low-latency kernel is faster still: it has no barrier and supports programmatic dependent
launch (kernels/low_latency.py), but it sends twice the bytes.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from text_generation_shard.engines.torch.parallel.symmetric import allocate_symmetric, rendezvous, succeed_together

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.kernels.low_latency import LowLatencyCollectives

MAX_LOW_LATENCY_BYTES = 64 * 1024
"""Largest low-latency all-reduce, in bytes: four rows of a wide model's residual stream."""
MAX_ONE_SHOT_BYTES = 512 * 1024
"""Largest one-shot all-reduce, in bytes."""
ONE_SHOT_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of torch's one-shot kernel."""


class AllReduce:
    """In-place all-reduce over the default process group. The constructor is a collective: all ranks call it together."""

    def __init__(
        self, device: torch.device, low_latency: "LowLatencyCollectives | None" = None, *, one_shot: bool = True
    ) -> None:
        """Set up for tensors on `device`. Without CUDA, `one_shot` or symmetric memory, all goes to the process group."""
        self._low_latency = low_latency
        self._buffers: dict[torch.dtype, Tensor] = {}
        if device.type == "cuda" and one_shot:
            self._buffers = _set_up(device)

    @property
    def is_one_shot(self) -> bool:
        """True if small all-reduces are one-shot."""
        return bool(self._buffers)

    def __call__(self, tensor: Tensor) -> None:
        """Sum `tensor`, contiguous, over the ranks, in place, on the current stream. Can be captured in a CUDA graph."""
        if (
            self._low_latency is not None
            and tensor.nbytes <= MAX_LOW_LATENCY_BYTES
            and self._low_latency.supports(tensor)
        ):
            self._low_latency.all_reduce(tensor)
            return
        buffer = self._buffers.get(tensor.dtype)
        if buffer is not None and tensor.numel() <= buffer.numel() and _is_aligned(tensor):
            _one_shot(tensor, buffer)
        else:
            dist.all_reduce(tensor)


def _is_aligned(tensor: Tensor) -> bool:
    """Return True if the one-shot kernel takes it: it moves multiples of 4 bytes and needs 16-byte alignment."""
    return tensor.nbytes % 4 == 0 and tensor.storage_offset() * tensor.itemsize % 16 == 0


def _one_shot(tensor: Tensor, buffer: Tensor) -> None:
    """Copy to the symmetric `buffer`, wait for the peers, add their buffers into `tensor`, wait again: one kernel.

    The last wait allows the next call to reuse the buffer. A thread writes only elements that it alone has read, so the output
    may be the input.
    """
    flat = tensor.view(-1)
    assert dist.group.WORLD is not None
    torch.ops.symm_mem.one_shot_all_reduce_copy_out(
        buffer[: flat.numel()], flat, "sum", dist.group.WORLD.group_name, out=flat
    )


def _set_up(device: torch.device) -> dict[torch.dtype, Tensor]:
    """Return the symmetric buffer, viewed as each supported dtype; empty if any rank cannot have it."""

    def allocate(_: None) -> dict[torch.dtype, Tensor]:
        memory = allocate_symmetric(MAX_ONE_SHOT_BYTES, torch.uint8, device)
        return {dtype: memory.view(dtype) for dtype in ONE_SHOT_DTYPES}

    def connect(buffers: dict[torch.dtype, Tensor]) -> dict[torch.dtype, Tensor]:
        rendezvous(buffers[torch.float32])
        return buffers

    def verify(buffers: dict[torch.dtype, Tensor]) -> dict[torch.dtype, Tensor]:
        # Check both dtypes before raising: a rank that stopped early would leave its peers waiting.
        size, wrong = dist.get_world_size(), 0
        for buffer in buffers.values():
            tensor = torch.full((buffer.numel(),), float(dist.get_rank() + 1), dtype=buffer.dtype, device=device)
            _one_shot(tensor, buffer)
            wrong += not bool((tensor == size * (size + 1) / 2).all())
        if wrong:
            raise RuntimeError("an all-reduce over symmetric memory gave a wrong result")
        return buffers

    return succeed_together((allocate, connect, verify), device, "NCCL is used for small all-reduces") or {}
