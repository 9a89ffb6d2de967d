"""Routers of mixtures of experts: the experts of each token, and their weights, from the logits of the router.

Pure functions on logits [tokens, experts], computed in float32. Each returns the ids [tokens, k] and the weights, float32
[tokens, k], of the chosen experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

Routed = tuple[Tensor, Tensor]


def softmax_top_k(logits: Tensor, k: int, *, normalize: bool, expert_scale: Tensor | None = None) -> Routed:
    """Choose by probability over all experts: Qwen2-MoE, Qwen3-MoE, OLMoE; normalized: Mixtral, Hunyuan.

    With `normalize`, the weights of a token sum to one (`norm_topk_prob`). Gemma 4 then multiplies them by `expert_scale` [experts].
    """
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if expert_scale is not None:
        weights = weights * expert_scale.float()[ids]
    return ids, weights


def top_k_softmax(logits: Tensor, k: int) -> Routed:
    """Choose by logit; the weights are the softmax of the chosen logits: gpt-oss, Granite-MoE."""
    chosen, ids = logits.float().topk(k, dim=-1)
    return ids, chosen.softmax(-1)


def sigmoid_top_k(
    logits: Tensor,
    k: int,
    *,
    correction: Tensor,
    groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routed:
    """Choose by sigmoid + `correction` [experts], weigh by the sigmoid alone: DeepSeek V3, GLM-4.5, dots1, MiniMax-M2.

    Only experts of the `top_groups` best of `groups` equal groups are chosen; a group counts as its two best experts do.
    """
    scores = logits.float().sigmoid()
    by_group = (scores + correction.float()).view(len(scores), groups, -1)
    if top_groups < groups:
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
        is_left_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, value=False)
        by_group = by_group.masked_fill(is_left_out.unsqueeze(-1), -torch.inf)
    ids = by_group.flatten(-2).topk(k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale
