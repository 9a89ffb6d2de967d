"""The smallest key in the set of a row's largest keys, where the set is given by its weight or its size.

`SORTING` sorts as many of the largest keys as needed; it suits a CPU. A device may bring a search of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CANDIDATES = (256, 4096)
"""Numbers of largest keys to sort before all are sorted: most sets of a given mass are far smaller."""


@dataclass(frozen=True, slots=True)
class ThresholdSearch:
    """The two searches on one kind of device."""

    smallest_set: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(keys, weights, mass) → threshold; see `smallest_set`."""
    kth_largest: Callable[[Tensor, Tensor], Tensor]
    """(keys, k) → threshold; see `kth_largest`."""


def smallest_set(keys: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """Return the smallest key [rows, 1] of the smallest set of largest keys whose weights reach `mass` [rows, 1].

    `keys` and `weights` are [rows, n] float32. A key belongs to the set if the weights before it fall short of the mass. If all
    weights fall short, the result is the smallest key of the row.
    """
    thresholds = torch.empty_like(keys[:, :1])
    open_rows = torch.arange(keys.shape[0])
    n = keys.shape[1]
    for count in (*CANDIDATES, n):
        largest = keys[open_rows].topk(min(count, n), dim=-1)
        ordered = weights[open_rows].gather(1, largest.indices).double()
        before = ordered.cumsum(-1) - ordered
        kept = (before < mass[open_rows]).sum(-1, keepdim=True).clamp_(min=1)
        thresholds[open_rows] = largest.values.gather(1, kept - 1)
        # If all candidates are kept, the set may be larger.
        open_rows = open_rows[kept.squeeze(1) == count]
        if count >= n or not open_rows.numel():
            break
    return thresholds


def kth_largest(keys: Tensor, k: Tensor) -> Tensor:
    """Return the kth largest key [rows, 1] of `keys` [rows, n] float32; `k` [rows, 1] is in 1 … n."""
    indices = k.long() - 1
    return keys.topk(int(indices.max()) + 1, dim=-1).values.gather(1, indices)


SORTING = ThresholdSearch(smallest_set, kth_largest)
