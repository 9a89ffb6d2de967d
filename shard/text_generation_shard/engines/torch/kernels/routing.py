"""The choice of experts by probability, as `choose_top_k` in layers/expert_linear.py; equal probabilities: the first expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.operands import Routing
from text_generation_shard.engines.torch.kernels.pdl import after_previous, pdl

_LEAST_KEY = tl.constexpr(-(1 << 63))


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return ids int32 and weights float32, [tokens, experts of each], for `logits` float32 [tokens, experts].

    The ids are valid for any logits; a row with NaN gets weights of NaN.
    """
    tokens, experts = len(logits), logits.shape[1] - routing.has_shared
    ids = torch.empty(tokens, routing.each, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.each, dtype=torch.float32, device=logits.device)
    _route_kernel[(tokens,)](
        logits,
        ids,
        weights,
        routing.scale,
        routing.choice_bias,
        routing.bias,
        logits.stride(0),
        routing.eps,
        GROUPS=routing.groups[0],
        GROUPS_KEPT=routing.groups[1],
        GROUP_BEST=routing.group_best,
        NORMALIZE=routing.normalize,
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts),
        CHOSEN=routing.chosen,
        CHOSEN_PADDED=triton.next_power_of_2(routing.chosen),
        HAS_SHARED=routing.has_shared,
        num_warps=1,
        **pdl(logits),
    )
    return ids, weights


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    power = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, power, 1.0) / (1.0 + power)


@triton.jit
def _route_kernel(  # noqa: PLR0913, PLR0915 – a kernel's arguments are flat
    logits: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    expert_scale: tl.tensor | None,
    choice_bias: tl.tensor | None,
    bias: tl.tensor | None,
    logits_stride: int,
    eps: float,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    after_previous(USE_PDL)
    token = tl.program_id(0)
    experts, places = tl.arange(0, BINS), tl.arange(0, CHOSEN_PADDED)
    inside = experts < EXPERTS
    row = tl.load(logits + token * logits_stride + experts, mask=inside, other=float("-inf"))
    if bias is not None:
        row += tl.load(bias + experts, mask=inside, other=0.0)
    # NaN is never equal to a maximum: it counts as the least likely, and is added to the weights again below.
    is_number = row == row
    numbers = tl.where(is_number, row, -3e38)
    if choice_bias is None:
        highest = tl.max(numbers, axis=0)
        left = tl.exp(numbers - highest)
        total = tl.sum(left, axis=0)
    else:
        left = _sigmoid(numbers) + tl.load(choice_bias + experts, mask=inside, other=0.0)
    left = tl.where(inside, left, -3e38)
    if GROUPS_KEPT < GROUPS:
        group = experts // (EXPERTS // GROUPS)
        totals = tl.full((BINS,), -3e38, tl.float32)
        for number in tl.static_range(GROUPS):
            own = tl.where(group == number, left, -3e38)
            best = tl.max(own, axis=0)
            if GROUP_BEST == 2:
                first = tl.min(tl.where(own == best, experts, BINS), axis=0)
                best += tl.max(tl.where(experts == first, -3e38, own), axis=0)
            totals = tl.where(group == number, best, totals)
        kept = experts < 0
        for _ in tl.static_range(GROUPS_KEPT):
            number = tl.min(tl.where(totals == tl.max(totals, axis=0), group, GROUPS), axis=0)
            kept = kept | (group == number)
            totals = tl.where(group == number, -3e38, totals)
        left = tl.where(kept, left, -3e38)
    # Floats in order are integers in order, if those of negative ones are reversed. The lowest bits prefer the first expert.
    bits = left.to(tl.int32, bitcast=True)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (BINS - 1 - experts)
    keys = tl.where(inside, keys, _LEAST_KEY)
    chosen_ids = tl.zeros((CHOSEN_PADDED,), tl.int32)
    for place in tl.static_range(CHOSEN):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, _LEAST_KEY, keys)
        chosen_ids = tl.where(places == place, BINS - 1 - (best & 0xFFFFFFFF).to(tl.int32), chosen_ids)
    is_place = places < CHOSEN
    chosen = tl.gather(numbers, chosen_ids, axis=0)
    chosen = tl.exp(chosen - highest) if choice_bias is None else _sigmoid(chosen)
    chosen = tl.where(is_place, chosen, 0.0)
    if NORMALIZE:
        divisor = tl.sum(chosen, axis=0) + eps
    elif choice_bias is None:
        divisor = total
    else:
        divisor = 1.0
    values = chosen / divisor + tl.sum(tl.where(is_number, 0.0, row), axis=0)
    if expert_scale is not None:
        values *= tl.load(expert_scale + chosen_ids).to(tl.float32)
    out = token * (CHOSEN + HAS_SHARED)
    tl.store(ids + out + places, chosen_ids, mask=is_place)
    tl.store(weights + out + places, values, mask=is_place)
    if HAS_SHARED:
        gate = tl.load(logits + token * logits_stride + EXPERTS)
        tl.store(ids + out + CHOSEN, EXPERTS)
        tl.store(weights + out + CHOSEN, tl.sigmoid(gate))
