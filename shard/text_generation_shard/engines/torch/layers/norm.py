"""The weights of RMS norms (Zhang and Sennrich 2019, arXiv 1910.07467)."""

import torch
from torch import Tensor
from torch.nn import functional


class RMSNorm:
    """x · rsqrt(mean(x²) + eps) · weight over vectors of some width. Fill `weight`, then process it."""

    def __init__(
        self,
        width: int,
        eps: float,
        device: torch.device,
        dtype: torch.dtype,
        *,
        zero_centered: bool = False,
        factor: float = 1.0,
    ) -> None:
        self.weight = torch.empty(width, device=device, dtype=dtype)
        self.eps = eps
        self._zero_centered = zero_centered
        self._factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed rows in the dtype of `x`, which the weight may exceed."""
        if self.weight.dtype == x.dtype:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)

    def process_weights_after_loading(self) -> None:
        """Add the 1 of a zero-centered weight, in float32, as it would take the bits of bfloat16, and multiply by the factor."""
        if self._zero_centered:
            self.weight = self.weight.float() + 1.0
        if self._factor != 1.0:
            self.weight = self.weight.float() * self._factor


class HeadNorms:
    """The norms of each query head and each key head before the rotation; with `values`, also of each value head, without a weight."""

    def __init__(self, query: RMSNorm, key: RMSNorm, *, values: bool = False) -> None:
        self.query, self.key, self.values = query, key, values
        self.rows = torch.empty(0)
        """[query heads + key heads, head_dim], after loading: one weight row per head, so that all are normed at once."""

    def fill_rows(self, num_heads: int, num_kv_heads: int, order: list[int] | None) -> None:
        """Fill `rows` from the processed weights, after reordering their dimensions: see `head_order`."""
        if order is not None:
            self.query.weight, self.key.weight = self.query.weight[order], self.key.weight[order]
        self.rows = torch.cat((self.query.weight.expand(num_heads, -1), self.key.weight.expand(num_kv_heads, -1)))
