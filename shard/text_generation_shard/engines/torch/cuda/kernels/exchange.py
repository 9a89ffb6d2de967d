"""Small sums and gathers over the GPUs of a group, each in one kernel without a barrier.

Every rank has an inbox in memory that all ranks have mapped. In an exchange each writes its values into the inboxes of all
the others, and takes theirs out of its own. A value travels in one store of 8 bytes together with the number of the exchange:
who reads the number has the value too. So there is neither a fence nor a flag of its own, and all takes as long as one store
over NVLink, and a load that sees it. (NCCL calls this protocol LL.)

    a slot      value: 32 bits │ number of the exchange: 32 bits
    an inbox    slots [2, size, capacity]: by the number's parity, by who sends, by element

The elements are cut into regions of BLOCK. Program i has region i in every exchange, and counts the exchanges of that region,
its epochs, from 1 on. All ranks make the same exchanges in the same order, so a region's epoch is the same on all of them,
though not in all regions: a small exchange has few programs. A program always sends all of its region.

Nothing that is still wanted is overwritten. For one region: a rank that sends in epoch e, into slots of parity e mod 2, has
ended epoch e - 1, for its kernels run one after the other. So it has received what each peer sent in e - 1; which that peer
began only when it had ended e - 2, and so had taken out all that was sent to it in e - 2. That is what the slots held. For
the same reason a slot of an epoch's parity holds what epoch e - 2 or epoch e has left there, and the low 32 bits of the two
numbers differ for ever; it holds zeros before its first use, which is neither's number then.

A program waits for the same program of its peers, whatever else runs: as long as all programs of an exchange fit on the GPU
at once, none can keep from running one that another waits for. Waiting has no end: of a group that has lost a rank the others
wait for ever, and have to be ended.
"""

# ruff: noqa: N803 – constants of kernels are in capitals, as Triton has them
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.cuda.kernels.chaining import can_chain, let_next_begin, wait_for_previous

BLOCK = 256
"""Elements of a region: 4096 floats are 16 programs, so that many multiprocessors send at the same time."""
_WARPS = 1
"""Of a program. A single warp agrees on what has arrived without a barrier."""


def inbox_shape(size: int, capacity: int) -> tuple[int, int, int]:
    """Of an inbox, int64, for exchanges of at most `capacity` elements, a multiple of BLOCK, between `size` ranks."""
    return 2, size, capacity


class Exchange:
    """Exchanges float32 tensors between the ranks of a group, on the current stream. Can be captured in CUDA graphs.

    All ranks make the same calls in the same order, with tensors of the same shapes, and each ends before the next begins: all
    are on one stream. All inboxes are zero before any rank makes its first call.
    """

    def __init__(self, rank: int, inbox: Tensor, addresses: Sequence[int]) -> None:
        """`inbox`: this rank's own, int64 of an `inbox_shape`, zeros, kept as long as this lives.

        `addresses`: where the inbox of each rank is mapped here, this rank's own too; multiples of 16.
        """
        _, _, self._capacity = inbox.shape
        self._rank = rank
        self._inbox = inbox
        self._addresses = tuple(addresses)
        self._epochs = torch.ones(self._capacity // BLOCK, dtype=torch.int64, device=inbox.device)

    def takes(self, tensor: Tensor) -> bool:
        """Whether `tensor`, which is contiguous, can be exchanged."""
        return tensor.dtype == torch.float32 and tensor.numel() <= self._capacity

    def sum(self, tensor: Tensor) -> None:
        """Sum `tensor`, contiguous, over the ranks, in place. In the order of ranks: the same bits on all of them."""
        chained = can_chain(tensor)
        _sum_kernel[(triton.cdiv(tensor.numel(), BLOCK),)](
            tensor,
            self._addresses,
            self._epochs,
            tensor.numel(),
            CAPACITY=self._capacity,
            RANK=self._rank,
            SIZE=len(self._addresses),
            CHAINED=chained,
            BLOCK=BLOCK,
            num_warps=_WARPS,
            launch_pdl=chained,
        )

    def gather(self, tensor: Tensor, out: Tensor) -> None:
        """Put the ranks' `tensor`s [rows, n], contiguous, side by side into `out` [rows, size · n]; rows may be padded."""
        chained = can_chain(tensor)
        _gather_kernel[(triton.cdiv(tensor.numel(), BLOCK),)](
            tensor,
            out,
            self._addresses,
            self._epochs,
            tensor.numel(),
            tensor.shape[1],
            out.stride(0),
            CAPACITY=self._capacity,
            RANK=self._rank,
            SIZE=len(self._addresses),
            CHAINED=chained,
            BLOCK=BLOCK,
            num_warps=_WARPS,
            launch_pdl=chained,
        )


@triton.jit
def _sum_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    values: tl.tensor,
    addresses: tl.tuple,
    epochs: tl.tensor,
    numel: int,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    region = tl.program_id(0)
    places = region * BLOCK + tl.arange(0, BLOCK)
    inside = places < numel
    own, epoch = _begin(values, epochs + region, places, inside, addresses, CAPACITY, RANK, SIZE, CHAINED)
    # Looks at all peers' slots at once: their loads are under way together. Triton 3.7 wants a loop's scalars made after its
    # tensors: else it cannot compile one whose tensor is only written.
    total = own
    waiting = 1
    while waiting > 0:
        late = tl.zeros((BLOCK,), tl.int32)
        for source in tl.static_range(SIZE):
            if source == RANK:
                part = own
            else:
                part, is_late = _look(epoch, places, addresses[RANK], source, CAPACITY, SIZE)
                late |= is_late
            if source == 0:
                total = part
            else:
                total += part
        waiting = tl.max(late)
    tl.store(values + places, total, mask=inside)
    tl.store(epochs + region, epoch + 1)


@triton.jit
def _gather_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    values: tl.tensor,
    out: tl.tensor,
    addresses: tl.tuple,
    epochs: tl.tensor,
    numel: int,
    width: int,
    out_stride: int,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    region = tl.program_id(0)
    places = region * BLOCK + tl.arange(0, BLOCK)
    inside = places < numel
    targets = out + places // width * out_stride + places % width
    own, epoch = _begin(values, epochs + region, places, inside, addresses, CAPACITY, RANK, SIZE, CHAINED)
    for source in tl.static_range(SIZE):
        part = own
        if source != RANK:
            waiting = 1
            while waiting > 0:
                part, is_late = _look(epoch, places, addresses[RANK], source, CAPACITY, SIZE)
                waiting = tl.max(is_late)
        tl.store(targets + source * width, part, mask=inside)
    tl.store(epochs + region, epoch + 1)


@triton.jit
def _begin(  # noqa: PLR0913 – called from kernels only, whose arguments are flat
    values: tl.tensor,
    epochs: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    addresses: tl.tuple,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Write the float32 `values` of a region into the inboxes of all peers; these, and the number that goes with them."""
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    own = tl.load(values + places, mask=inside, other=0.0)
    epoch = tl.load(epochs)
    packed = (own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (epoch << 32)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(_slots(addresses[peer], epoch, RANK, places, CAPACITY, SIZE), packed)
    return own, epoch


@triton.jit
def _look(
    epoch: tl.tensor,
    places: tl.tensor,
    inbox: tl.tensor,
    source: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What lies in the slots of `source`, as float32, and 1 where it is not of this epoch yet, as int32."""
    # Volatile: read from memory each time.
    arrived = tl.load(_slots(inbox, epoch, source, places, CAPACITY, SIZE), volatile=True)
    is_late = (arrived >> 32) != (epoch << 32 >> 32)
    return arrived.to(tl.int32).to(tl.float32, bitcast=True), is_late.to(tl.int32)


@triton.jit
def _slots(
    inbox: tl.tensor,
    epoch: tl.tensor,
    source: tl.constexpr,
    places: tl.tensor,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    # That it is aligned gets lost on the way from a number to a pointer; it lets a thread move two slots at once.
    first = tl.multiple_of(inbox.to(tl.pointer_type(tl.int64)), 16)
    return first + ((epoch & 1) * SIZE + source) * CAPACITY + places
