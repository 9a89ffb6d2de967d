"""Sums over the GPUs of a group: small ones by one kernel that reads all the others' memory, large ones by NCCL.

A decode step has two sums a layer, of a few hundred KiB at most. There NCCL's time is latency; a kernel in which each GPU
reads its peers' buffers over NVLink and adds up, "one-shot", takes a fraction of it. torch has it, over symmetric memory:
the same buffer on each GPU, mapped into all. It reads size × bytes where NCCL's ring moves 2 × bytes: beyond SMALL NCCL is the
faster one. NVLink multicast is not used: not every machine that has it lets a container set it up.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

SMALL = 512 * 1024
"""Bytes up to which a sum is one-shot."""
SUMMED_AT_ONCE = (torch.float32, torch.bfloat16)
"""What torch's one-shot kernel is compiled for."""

log = structlog.get_logger()


class AllReduce:
    """In-place sums over the default process group. Making one is a collective: all ranks make theirs at the same time."""

    def __init__(self, device: torch.device) -> None:
        """`device`: of the tensors that will come. Without CUDA, and where symmetric memory cannot be had, all is the group's."""
        self._buffers: dict[torch.dtype, Tensor] = {}
        if device.type == "cuda":
            self._buffers = _set_up(device)

    @property
    def is_one_shot(self) -> bool:
        """Whether small sums are one-shot."""
        return bool(self._buffers)

    def __call__(self, tensor: Tensor) -> None:
        """Sum `tensor`, contiguous, over the ranks, in place, on the current stream. Can be captured in a CUDA graph."""
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
    """The symmetric buffer as each type that can be summed; empty if any rank cannot have it.

    The ranks agree after each stage: one that went on alone would wait for the others for ever.
    """
    # Each process sees its own GPU alone, so all are number 0: what looks like one device is not.
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    buffers: dict[torch.dtype, Tensor] = {}

    def allocate() -> None:
        import torch.distributed._symmetric_memory as symm_mem

        memory = symm_mem.empty(SMALL, dtype=torch.uint8, device=device)
        buffers.update({dtype: memory.view(dtype) for dtype in SUMMED_AT_ONCE})

    def share() -> None:
        import torch.distributed._symmetric_memory as symm_mem

        assert dist.group.WORLD is not None
        symm_mem.rendezvous(buffers[torch.float32], dist.group.WORLD.group_name)

    def prove() -> None:
        size = dist.get_world_size()
        for buffer in buffers.values():
            tensor = torch.full((buffer.numel(),), float(dist.get_rank() + 1), dtype=buffer.dtype, device=device)
            _one_shot(tensor, buffer)
            if not bool((tensor == size * (size + 1) / 2).all()):
                raise RuntimeError("a sum over symmetric memory came out wrong")

    for stage in (allocate, share, prove):
        problem = _attempt(stage)
        agreed = torch.tensor([0 if problem else 1], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        if not agreed.item():
            log.warning("small sums are left to NCCL", reason=problem or "another rank has no symmetric memory")
            return {}
    return buffers


def _attempt(stage: Callable[[], None]) -> str | None:
    """Why it failed; None if it did not."""
    try:
        stage()
    except Exception as error:  # noqa: BLE001 – whatever it is, NCCL can do without
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None
