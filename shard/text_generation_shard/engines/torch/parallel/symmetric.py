"""Symmetric memory: buffers of each GPU that all other GPUs of the group have mapped.

Not every machine supports it. Set-up therefore has stages, and after each stage the ranks agree whether all have succeeded: a
rank that continued alone would wait for the others forever.
"""

import os
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from text_generation_common.log import log
from text_generation_common.one_line import typed_line

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.kernels.low_latency import LowLatencyCollectives

MAX_GATHERED_ROW = 256 * 1024
"""Elements of all ranks together in a low-latency all-gather: a row of logits with the largest vocabularies.

With two ranks these are 512 warps, which every GPU runs at once.
"""


def allocate_symmetric(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate uninitialized memory that can be shared."""
    import torch.distributed._symmetric_memory as symm_mem  # torch has no public name for it

    # Each process sees only its own GPU, so all are device 0: this would be taken for one shared device.
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    # NVLink multicast cannot be set up in every container.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    return symm_mem.empty(elements, dtype=dtype, device=device)


def rendezvous(memory: Tensor) -> list[int]:
    """Share memory allocated by `symmetric` on all ranks; returns its address on each rank. A collective."""
    import torch.distributed._symmetric_memory as symm_mem  # torch has no public name for it

    assert dist.group.WORLD is not None
    return symm_mem.rendezvous(memory, dist.group.WORLD.group_name).buffer_ptrs


def succeed_together(stages: Sequence[Callable[[Any], Any]], device: torch.device, otherwise: str) -> Any:  # noqa: ANN401
    """Run the stages, each with the result of the one before; return the last result if all succeeded on all ranks. A collective.

    Otherwise log `otherwise` and return None. When a stage begins, all ranks have finished the previous one, including its kernels.
    """
    result = None
    for stage in stages:
        problem = None
        try:
            result = stage(result)
        except Exception as error:  # noqa: BLE001 – NCCL works without it
            problem = typed_line(error, 300)
        agreed = torch.tensor([0 if problem else 1], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        if not agreed.item():
            log.warning(otherwise, reason=problem or "another rank failed")
            return None
    return result


def create_low_latency_collectives(device: torch.device) -> "LowLatencyCollectives | None":
    """Create the low-latency collectives of the default process group; None if any rank cannot. A collective."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def allocate(_: None) -> Tensor:
        from text_generation_shard.engines.torch.kernels.low_latency import BLOCK, inbox_shape

        shape = inbox_shape(size, MAX_GATHERED_ROW // size // BLOCK * BLOCK)
        return allocate_symmetric(prod(shape), torch.int64, device).zero_().view(shape)

    def connect(inbox: Tensor) -> "LowLatencyCollectives":
        from text_generation_shard.engines.torch.kernels.low_latency import BLOCK, LowLatencyCollectives

        low_latency = LowLatencyCollectives(rank, inbox, rendezvous(inbox))
        # Launches nothing, but compiles: a rank that failed in the next stage would leave its peers waiting.
        low_latency.all_reduce(torch.empty(0, device=device))
        low_latency.all_gather(torch.empty(0, BLOCK, device=device), torch.empty(0, size * BLOCK, device=device))
        return low_latency

    def verify(low_latency: "LowLatencyCollectives") -> "LowLatencyCollectives":
        # All rounds before raising: a rank that stopped early would leave its peers waiting.
        wrong, capacity = 0, low_latency.capacity
        numbers = torch.arange(size * capacity, dtype=torch.float32, device=device).view(1, -1)
        for _ in range(3):
            summed, gathered = numbers * (rank + 1), torch.empty_like(numbers)
            low_latency.all_reduce(summed[:, :capacity])
            low_latency.all_gather(numbers[:, rank * capacity :][:, :capacity], gathered)
            expected = numbers[:, :capacity] * (size * (size + 1) // 2)
            wrong += not (torch.equal(summed[:, :capacity], expected) and torch.equal(gathered, numbers))
        if wrong:
            raise RuntimeError("a low-latency collective over symmetric memory gave a wrong result")
        return low_latency

    otherwise = "torch is used for small all-reduces and all-gathers"
    created: LowLatencyCollectives | None = succeed_together((allocate, connect, verify), device, otherwise)
    return created
