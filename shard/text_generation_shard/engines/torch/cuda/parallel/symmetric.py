"""Memory of each GPU of a group that all the others have mapped: torch's symmetric memory.

Not every machine lets processes have it. So what is built on it is set up in stages, and after each the ranks agree on
whether all of them have come so far: one that went on alone would wait for the others for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.cuda.kernels.exchange import Exchange

EXCHANGED_ROW = 256 * 1024
"""Elements of all ranks together that an exchange takes: a row of logits over the largest of vocabularies.

Two ranks' are 512 warps, which any GPU runs at once.
"""

log = structlog.get_logger()


def symmetric(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that can be shared, with whatever is in it."""
    import torch.distributed._symmetric_memory as symm_mem

    # Each process sees its own GPU alone, so all are number 0: what looks like one device is not.
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    # Not every machine that has NVLink multicast lets a container set it up.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    return symm_mem.empty(elements, dtype=dtype, device=device)


def share(memory: Tensor) -> list[int]:
    """Share what `symmetric` made, and all ranks made alike: where each rank's is mapped here. A collective."""
    import torch.distributed._symmetric_memory as symm_mem

    assert dist.group.WORLD is not None
    return symm_mem.rendezvous(memory, dist.group.WORLD.group_name).buffer_ptrs


def all_succeed(stages: Sequence[Callable[[], None]], device: torch.device, otherwise: str) -> bool:
    """Whether all ranks have gone through all stages; says `otherwise` in the log if not. A collective.

    When a stage begins, all ranks have ended the one before it, their kernels too.
    """
    for stage in stages:
        problem = _attempt(stage)
        agreed = torch.tensor([0 if problem else 1], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        if not agreed.item():
            log.warning(otherwise, reason=problem or "another rank cannot do more")
            return False
    return True


def open_exchange(device: torch.device) -> Exchange | None:
    """The exchange of the default process group; None if any rank cannot have it. A collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inboxes: list[Tensor] = []
    exchanges: list[Exchange] = []

    def allocate() -> None:
        from text_generation_shard.engines.torch.cuda.kernels.exchange import BLOCK, inbox_shape

        shape = inbox_shape(size, EXCHANGED_ROW // size // BLOCK * BLOCK)
        inboxes.append(symmetric(prod(shape), torch.int64, device).zero_().view(shape))

    def connect() -> None:
        from text_generation_shard.engines.torch.cuda.kernels.exchange import BLOCK, Exchange

        exchange = Exchange(rank, inboxes[0], share(inboxes[0]))
        # Launches nothing, but compiles: a rank that failed only in the next stage would leave its peers waiting.
        exchange.sum(torch.empty(0, device=device))
        exchange.gather(torch.empty(0, BLOCK, device=device), torch.empty(0, size * BLOCK, device=device))
        exchanges.append(exchange)

    def prove() -> None:
        # All rounds before anything is said of any: a rank that left early would leave its peers waiting.
        (exchange,), capacity = exchanges, inboxes[0].shape[2]
        wrong = 0
        numbers = torch.arange(size * capacity, dtype=torch.float32, device=device).view(1, -1)
        for _ in range(3):
            summed, gathered = numbers * (rank + 1), torch.empty_like(numbers)
            exchange.sum(summed[:, :capacity])
            exchange.gather(numbers[:, rank * capacity :][:, :capacity], gathered)
            expected = numbers[:, :capacity] * (size * (size + 1) // 2)
            wrong += not (torch.equal(summed[:, :capacity], expected) and torch.equal(gathered, numbers))
        if wrong:
            raise RuntimeError("an exchange over symmetric memory came out wrong")

    if not all_succeed((allocate, connect, prove), device, "small sums and gathers are left to torch"):
        return None
    return exchanges[0]


def _attempt(stage: Callable[[], None]) -> str | None:
    """Why it failed; None if it did not."""
    try:
        stage()
    except Exception as error:  # noqa: BLE001 – whatever it is, NCCL can do without
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None
