"""Groups the pairs (token, expert) of a mixture of experts by expert, for products of all rows of an expert with its weight.

A stable counting sort by one program for each expert, which reads all pairs. Nothing waits for the host, and nothing depends on the
order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.pdl import after_previous, pdl

_CHUNK = 2048
"""Most pairs that a program reads at a time."""
_NOWHERE = tl.constexpr(1 << 30)
"""Greater than the number of any expert."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """The rows of a grouped product: the pairs in order of their experts."""

    order: Tensor
    """int32 [pairs]: the pair of each row; pair p is the (p mod k)-th expert of token p div k."""
    rows: Tensor
    """int32 [pairs]: the row of each pair."""
    offsets: Tensor
    """int32 [experts + 1]: the first row of each expert, and the end of the last one's rows."""

    @property
    def ends(self) -> Tensor:
        """int32 [experts]: the end of each expert's rows."""
        return self.offsets[1:]


def group_by_expert(ids: Tensor, experts: int) -> ExpertGroups:
    """Group the pairs of `ids` [tokens, k], contiguous integers below `experts`."""
    pairs = ids.numel()
    memory = torch.empty(2 * pairs + experts + 1, dtype=torch.int32, device=ids.device)
    order, rows, offsets = torch.split(memory, [pairs, pairs, experts + 1])
    chunk = min(max(triton.next_power_of_2(pairs), 32), _CHUNK)
    _place_kernel[(experts,)](
        ids, order, rows, offsets, pairs, CHUNK=chunk, num_warps=min(max(chunk // 128, 1), 8), **pdl(ids)
    )
    return ExpertGroups(order, rows, offsets)


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["rows", "offsets"])
def _place_kernel(
    ids: tl.tensor,
    order: tl.tensor,
    rows: tl.tensor,
    offsets: tl.tensor,
    pairs: int,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    after_previous(USE_PDL)
    expert = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, pairs, CHUNK):
        some = tl.load(ids + first + at, mask=first + at < pairs, other=_NOWHERE)
        before += (some < expert).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(offsets + expert, place)
    for first in range(0, pairs, CHUNK):
        some = tl.load(ids + first + at, mask=first + at < pairs, other=_NOWHERE)
        is_own = some == expert
        places = place + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + places, first + at, mask=is_own)
        tl.store(rows + first + at, places, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), axis=0)
    if expert == tl.num_programs(0) - 1:
        tl.store(offsets + expert + 1, place)
