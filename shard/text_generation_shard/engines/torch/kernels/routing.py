"""The choice of experts by probability, as `softmax_top_k` in layers/expert_linear.py; equal probabilities: the first expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def route(
    logits: Tensor, experts_each: int, *, normalize: bool, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ids int32 and weights float32, [tokens, experts_each], for `logits` float32 [tokens, experts].

    The weights are multiplied by the `expert_scale` [experts] of their experts. The ids are valid for any logits; a row with NaN gets
    weights of NaN.
    """
    tokens, experts = logits.shape
    ids = torch.empty(tokens, experts_each, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, experts_each, dtype=torch.float32, device=logits.device)
    _route_kernel[(tokens,)](
        logits,
        ids,
        weights,
        expert_scale,
        logits.stride(0),
        NORMALIZE=normalize,
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts),
        EACH=experts_each,
        EACH_PADDED=triton.next_power_of_2(experts_each),
        num_warps=1,
    )
    return ids, weights


@triton.jit
def _route_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    logits: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    expert_scale: tl.tensor | None,
    logits_stride: int,
    NORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    EACH: tl.constexpr,
    EACH_PADDED: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    experts, places = tl.arange(0, BINS), tl.arange(0, EACH_PADDED)
    inside = experts < EXPERTS
    row = tl.load(logits + token * logits_stride + experts, mask=inside, other=float("-inf"))
    # NaN is never equal to a maximum: it counts as the least likely, and is added to the weights again below.
    is_number = row == row
    numbers = tl.where(is_number, row, -3e38)
    left = tl.exp(numbers - tl.max(numbers, axis=0))
    total = tl.sum(left, axis=0)
    chosen_ids = tl.zeros((EACH_PADDED,), tl.int32)
    chosen = tl.zeros((EACH_PADDED,), tl.float32)
    for place in tl.static_range(EACH):
        best = tl.max(left, axis=0)
        index = tl.min(tl.where((left == best) & inside, experts, EXPERTS - 1), axis=0)
        chosen_ids = tl.where(places == place, index, chosen_ids)
        chosen = tl.where(places == place, best, chosen)
        left = tl.where(experts == index, -1.0, left)
    divisor = tl.sum(chosen, axis=0) if NORMALIZE else total
    values = chosen / divisor + tl.sum(tl.where(is_number, 0.0, row), axis=0)
    is_place = places < EACH
    if expert_scale is not None:
        values *= tl.load(expert_scale + chosen_ids).to(tl.float32)
    tl.store(ids + token * EACH + places, chosen_ids, mask=is_place)
    tl.store(weights + token * EACH + places, values, mask=is_place)
