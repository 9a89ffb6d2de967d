"""The weights of RMS norms (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch


class RMSNorm:
    """x · rsqrt(mean(x²) + eps) · weight over vectors of some width."""

    def __init__(self, width: int, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = torch.empty(width, device=device, dtype=dtype)
        self.eps = eps


class HeadNorms:
    """The norms of each query head and each key head before the rotation."""

    def __init__(self, query: RMSNorm, key: RMSNorm) -> None:
        self.query, self.key = query, key
        self.rows = torch.empty(0)
        """[query heads + key heads, head_dim], after `stack`: one weight row per head, so that all are normed at once."""

    def stack(self, num_heads: int, num_kv_heads: int) -> None:
        """Fill `rows` from the loaded weights."""
        weights = (self.query.weight.expand(num_heads, -1), self.key.weight.expand(num_kv_heads, -1))
        self.rows = torch.cat(weights)
