"""References of decode attention over a paged cache and of greedy sampling, in any float dtype."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 16


def keys_and_values(cache_layer: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [KV heads, length, head_dim] from a cache layer and a block table."""
    blocks = cache_layer[table[: -(-length // BLOCK_SIZE)].long()]
    keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return keys, values


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention [heads, head_dim] of one query [heads, head_dim] at the position of the last key."""
    if window is not None:
        keys, values = keys[:, -window:], values[:, -window:]
    share = query.shape[0] // keys.shape[0]
    keys, values = (tensor.repeat_interleave(share, dim=0) for tensor in (keys, values))
    scores = torch.einsum("hd,hkd->hk", query, keys) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if sinks is not None:
        scores = torch.cat((scores, sinks.unsqueeze(1)), dim=1)
    return torch.einsum("hk,hkd->hd", scores.softmax(1)[:, : keys.shape[1]], values)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index of each row's maximum, and its log-probability."""
    best = logits.max(1, keepdim=True).values
    tokens = (logits == best).int().argmax(1)
    return tokens, logits.log_softmax(1).gather(1, tokens[:, None]).squeeze(1)
