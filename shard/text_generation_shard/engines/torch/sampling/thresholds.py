"""Which key closes the set of a row's largest keys, by their weight or their number.

On a GPU a kernel searches for it; on a CPU the largest keys are sorted, as many as it takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

CANDIDATES = (256, 4096)
"""How many of the largest keys are sorted before all are: most sets of a given mass are far smaller."""


def smallest_set(keys: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """The least key [rows, 1] among the fewest of largest key whose weights reach `mass` [rows, 1]; the least of all if none do.

    `keys` and `weights` [rows, n] float32. A key belongs to the set as long as those before it fall short of the mass.
    """
    if keys.is_cuda:
        from text_generation_shard.engines.torch.cuda.kernels.threshold import smallest_set_threshold

        return smallest_set_threshold(keys, weights, mass)
    thresholds = torch.empty_like(keys[:, :1])
    open_rows = torch.arange(keys.shape[0])
    n = keys.shape[1]
    for count in (*CANDIDATES, n):
        largest = keys[open_rows].topk(min(count, n), dim=-1)
        ordered = weights[open_rows].gather(1, largest.indices).double()
        before = ordered.cumsum(-1) - ordered
        kept = (before < mass[open_rows]).sum(-1, keepdim=True).clamp_(min=1)
        thresholds[open_rows] = largest.values.gather(1, kept - 1)
        # All candidates kept: the set may go on beyond them.
        open_rows = open_rows[kept.squeeze(1) == count]
        if count >= n or not open_rows.numel():
            break
    return thresholds


def kth_largest(keys: Tensor, k: Tensor) -> Tensor:
    """The kth largest key [rows, 1] of `keys` [rows, n] float32; `k` [rows, 1], 1 … n."""
    if keys.is_cuda:
        from text_generation_shard.engines.torch.cuda.kernels import threshold

        return threshold.kth_largest(keys, k)
    places = k.long() - 1
    return keys.topk(int(places.max()) + 1, dim=-1).values.gather(1, places)
