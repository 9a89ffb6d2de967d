"""Low-latency all-reduce and all-gather over the GPUs of a group: one kernel each, without a barrier.

Every rank has an inbox in memory that all ranks have mapped. Each rank writes its values to the inboxes of all others and reads
theirs from its own. A value is stored in 8 bytes together with the number of the collective, so a reader that sees the number
has the value too. This needs no fence and no separate flag, and takes as long as one store over NVLink plus one load that sees
it. (NCCL calls this protocol LL.)

    a slot      value: 32 bits │ number of the collective: 32 bits
    an inbox    slots [2, size, capacity]: parity of the number, sender, element

The elements are divided into regions of BLOCK. Program i handles region i in every collective and counts the collectives of
that region, its epochs, from 1 on. All ranks call the same collectives in the same order, so the epoch of a region is the same
on all ranks, but not in all regions: a small collective has few programs. A program always sends its whole region.

No value is overwritten before it is read. For one region: a rank that sends in epoch e, to slots of parity e mod 2, has
finished epoch e - 1, because its kernels run in order. So it has received what each peer sent in e - 1. That peer sent it after
it had finished e - 2, so it had read everything that was sent to it in e - 2, which is what the slots held. For the same reason
a slot of the parity of epoch e holds the number e - 2 or e, whose low 32 bits always differ. Before its first use it holds
zeros, which match neither.

A program waits for the program of the same region on its peers. There is no deadlock as long as all programs of a collective
fit on the GPU at once. The wait has no timeout: if a rank of the group is lost, the others wait forever and must be killed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.pdl import after_previous, pdl

BLOCK = 256
"""Elements of a region: 4096 floats are 16 programs, so that many multiprocessors send at the same time."""
_WARPS = 1
"""Warps per program. A single warp agrees on what has arrived without a barrier."""


def inbox_shape(size: int, capacity: int) -> tuple[int, int, int]:
    """Return the shape of an inbox, int64, for at most `capacity` elements, a multiple of BLOCK, and `size` ranks."""
    return 2, size, capacity


class LowLatencyCollectives:
    """All-reduce and all-gather of float32 tensors on the current stream. Can be captured in CUDA graphs.

    All ranks make the same calls in the same order, with tensors of the same shapes, on one stream. All inboxes are zero before
    any rank makes its first call.
    """

    def __init__(self, rank: int, inbox: Tensor, addresses: Sequence[int]) -> None:
        """`inbox`: this rank's inbox, int64 of an `inbox_shape`, zeros, kept as long as this object lives.

        `addresses`: the address of each rank's inbox in this process, including this rank's own; multiples of 16.
        """
        _, _, self.capacity = inbox.shape
        self._rank = rank
        self._inbox = inbox
        self._addresses = tuple(addresses)
        self._epochs = torch.ones(self.capacity // BLOCK, dtype=torch.int64, device=inbox.device)

    def supports(self, tensor: Tensor) -> bool:
        """Return True if `tensor`, contiguous, can be sent."""
        return tensor.dtype == torch.float32 and tensor.numel() <= self.capacity

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor`, contiguous, over the ranks, in place. Adds in rank order, so all ranks get the same bits."""
        self._launch(_all_reduce_kernel, tensor)

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Concatenate the ranks' `tensor`s [rows, n], contiguous, into `out` [rows, size · n], whose rows may be padded."""
        self._launch(_all_gather_kernel, tensor, out, tensor.shape[1], out.stride(0))

    def _launch(self, kernel: Any, tensor: Tensor, *others: Tensor | int) -> None:  # noqa: ANN401 – a kernel of Triton
        kernel[(triton.cdiv(tensor.numel(), BLOCK),)](
            tensor,
            self._addresses,
            self._epochs,
            tensor.numel(),
            *others,
            CAPACITY=self.capacity,
            RANK=self._rank,
            SIZE=len(self._addresses),
            BLOCK=BLOCK,
            num_warps=_WARPS,
            **pdl(tensor),
        )


@triton.jit
def _all_reduce_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    values: tl.tensor,
    addresses: tl.tuple,
    epochs: tl.tensor,
    numel: int,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    region = tl.program_id(0)
    indices = region * BLOCK + tl.arange(0, BLOCK)
    inside = indices < numel
    own, epoch = _send(values, epochs + region, indices, inside, addresses, CAPACITY, RANK, SIZE, USE_PDL)
    # Polls the slots of all peers at once, so that their loads overlap. Triton 3.7 cannot compile a loop with a write-only tensor
    # unless the scalars of the loop are defined after its tensors.
    total = own
    waiting = 1
    while waiting > 0:
        late = tl.zeros((BLOCK,), tl.int32)
        for source in tl.static_range(SIZE):
            if source == RANK:
                part = own
            else:
                part, is_late = _look(epoch, indices, addresses[RANK], source, CAPACITY, SIZE)
                late |= is_late
            if source == 0:
                total = part
            else:
                total += part
        waiting = tl.max(late)
    tl.store(values + indices, total, mask=inside)
    tl.store(epochs + region, epoch + 1)


@triton.jit
def _all_gather_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    values: tl.tensor,
    addresses: tl.tuple,
    epochs: tl.tensor,
    numel: int,
    out: tl.tensor,
    width: int,
    out_stride: int,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    region = tl.program_id(0)
    indices = region * BLOCK + tl.arange(0, BLOCK)
    inside = indices < numel
    targets = out + indices // width * out_stride + indices % width
    own, epoch = _send(values, epochs + region, indices, inside, addresses, CAPACITY, RANK, SIZE, USE_PDL)
    for source in tl.static_range(SIZE):
        part = own
        if source != RANK:
            waiting = 1
            while waiting > 0:
                part, is_late = _look(epoch, indices, addresses[RANK], source, CAPACITY, SIZE)
                waiting = tl.max(is_late)
        tl.store(targets + source * width, part, mask=inside)
    tl.store(epochs + region, epoch + 1)


@triton.jit
def _send(  # noqa: PLR0913 – called from kernels only, whose arguments are flat
    values: tl.tensor,
    epochs: tl.tensor,
    indices: tl.tensor,
    inside: tl.tensor,
    addresses: tl.tuple,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Send the float32 `values` of a region to the inboxes of all peers; return the values and the epoch."""
    after_previous(USE_PDL)
    own = tl.load(values + indices, mask=inside, other=0.0)
    epoch = tl.load(epochs)
    packed = (own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (epoch << 32)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(_slots(addresses[peer], epoch, RANK, indices, CAPACITY, SIZE), packed)
    return own, epoch


@triton.jit
def _look(
    epoch: tl.tensor,
    indices: tl.tensor,
    inbox: tl.tensor,
    source: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Read the slots of `source`: values as float32, and int32 1 where they are not of this epoch yet."""
    # Volatile: read from memory each time.
    arrived = tl.load(_slots(inbox, epoch, source, indices, CAPACITY, SIZE), volatile=True)
    is_late = (arrived >> 32) != (epoch << 32 >> 32)
    return arrived.to(tl.int32).to(tl.float32, bitcast=True), is_late.to(tl.int32)


@triton.jit
def _slots(
    inbox: tl.tensor,
    epoch: tl.tensor,
    source: tl.constexpr,
    indices: tl.tensor,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    # The cast from integer to pointer loses the alignment; with it, a thread moves two slots at once.
    first = tl.multiple_of(inbox.to(tl.pointer_type(tl.int64)), 16)
    return first + ((epoch & 1) * SIZE + source) * CAPACITY + indices
