"""Routing in mixtures of experts: the experts of each token, and their weights, from the logits of the router."""

from __future__ import annotations

import torch
from torch import Tensor

Routed = tuple[Tensor, Tensor]
"""The ids [tokens, k] and the weights, float32 [tokens, k], of the chosen experts."""


def softmax_top_k(logits: Tensor, k: int, *, normalize: bool, expert_scale: Tensor | None = None) -> Routed:
    """Choose by probability over all experts, from `logits` [tokens, experts]; computed in float32.

    With `normalize`, the weights of a token sum to one (`norm_topk_prob`), as in a softmax of the chosen logits. Gemma 4 then
    multiplies them by `expert_scale` [experts].
    """
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if expert_scale is not None:
        weights = weights * expert_scale.float()[ids]
    return ids, weights
