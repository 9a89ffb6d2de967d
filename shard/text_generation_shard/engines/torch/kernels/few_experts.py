"""The mixture of experts of a few tokens: every pair of a token and an expert is a product of one row.

A product of one row takes as long as reading the expert's weight. Tokens with the same expert read it more than once, which is rare
if they are few, and finds it in the L2 cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.expert_rows import weighted_sum
from text_generation_shard.engines.torch.kernels.matvec import matvec
from text_generation_shard.engines.torch.kernels.operands import ChosenExperts, ExpertWeights, GatedActivation
from text_generation_shard.engines.torch.kernels.packed_weight import MatvecWeight

PACKED_SHARE = 0.5
"""Unpacking a weight for every pair takes as long as reading it."""


def few_weights(gate_up: ExpertWeights, down: ExpertWeights, pairs: int) -> tuple[MatvecWeight, MatvecWeight] | None:
    """Return the weights of both products if they are faster than products grouped by expert.

    They are while there are no more pairs than experts: most experts then have one pair. On an H200 with
    Qwen3-30B-A3B, 1, 4 and 16 tokens take 24, 72 and 265 µs, and 72, 151 and 317 µs by groups.
    """
    if pairs > len(gate_up.weight) * (1.0 if gate_up.packed_product is None else PACKED_SHARE):
        return None
    pair = gate_up.matvec_weight, down.matvec_weight
    return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])


def few_experts(  # noqa: PLR0913 – the options of three kernels
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: GatedActivation,
    few: tuple[MatvecWeight, MatvecWeight],
    *,
    norm: tuple[Tensor | None, float] = (None, 0.0),
    out: Tensor | None = None,
    add: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Return the weighted sum over the k experts of each token, as `experts` does; `few` are the `few_weights`.

    With a `norm` (weight and eps), x is float32 and normed first. With `out` [tokens, hidden], `scale` times the sum is written to
    it, or added to it if `add`.
    """
    pairs, (count, doubled, _) = ids.numel(), gate_up.weight.shape
    dtype = x.dtype if norm[0] is None else gate_up.weight.dtype
    inner = torch.empty(pairs, doubled // 2, dtype=dtype, device=x.device)
    results = torch.empty(pairs, down.weight.shape[1], dtype=torch.float32, device=x.device)
    experts = ChosenExperts(ids, ids.shape[1], count)
    matvec(x, few[0], inner, gate_up.bias, norm=norm, activation=activation, experts=experts)
    matvec(inner, few[1], results, experts=ChosenExperts(ids, 1, count))
    if out is None:
        out = torch.empty(len(ids), results.shape[1], dtype=dtype, device=x.device)
    return weighted_sum(results, None, ids, weights, down.bias, out, add=add, scale=scale)
