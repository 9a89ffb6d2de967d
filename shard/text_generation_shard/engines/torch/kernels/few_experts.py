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


def few_experts(  # noqa: PLR0913 – the options of three kernels
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: GatedActivation,
    few: tuple[MatvecWeight, MatvecWeight],
    *,
    out: Tensor | None = None,
    add: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Return the weighted sum over the k experts of each token, as `experts` does; `few` are the `few_weights`.

    With `out` [tokens, hidden], `scale` times the sum is written to it, or added to it if `add`.
    """
    pairs, (count, columns, _) = ids.numel(), gate_up.weight.shape
    gated = activation if activation.has_gate else None
    inner = x.new_empty(pairs, columns if gated is None else columns // 2)
    results = torch.empty(pairs, down.weight.shape[1], dtype=torch.float32, device=x.device)
    experts = ChosenExperts(ids, ids.shape[1], count)
    matvec(x, few[0], inner, gate_up.bias, activation=gated, experts=experts)
    if gated is None:
        inner = activation(inner)
    matvec(inner, few[1], results, experts=ChosenExperts(ids, 1, count, known=True))
    if out is None:
        out = x.new_empty(len(ids), results.shape[1])
    return weighted_sum(results, None, ids, weights, down.bias, out, add=add, scale=scale)
