"""The dtypes of the intermediate results of a forward pass.

A step of a wide model is bound by memory traffic and arithmetic. A step of a narrow model is bound by kernel launches, so that
more bits are free as long as they need no extra kernel. In narrow models products therefore return float32, as they are summed,
and normed hidden states are float16, with eleven significant bits instead of the eight of bfloat16.

float16 ends at 65,504. The outputs of a norm are bounded for any input. The outputs of attention and of the gated
activation are not, and keep the dtype of the model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from text_generation_common.log import log
from text_generation_shard.engines.torch.layers.norm import RMSNorm

MAX_NARROW_HIDDEN_SIZE = 1024
"""Hidden size up to which a model is narrow."""
FLOAT16_MAX = torch.finfo(torch.float16).max
MAX_LOSS = 2.0**-13
"""Largest relative error, in the norm of a weight, of its conversion to float16: less than its inputs lose."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a forward pass. The residual stream is float32 on a GPU."""

    model: torch.dtype
    """Dtype of the loaded weights, the KV cache, the queries, and the outputs of attention and activation."""
    products: torch.dtype
    """Dtype of the outputs of a layer's products."""
    normed: torch.dtype
    """Dtype of normed hidden states and of the weights that they are multiplied with."""
    logits: torch.dtype = torch.float32

    @classmethod
    def uniform(cls, dtype: torch.dtype) -> "Precision":
        """Return one dtype for everything, which is fastest on a CPU."""
        return cls(dtype, dtype, dtype, dtype)

    @classmethod
    def of(cls, hidden_size: int, dtype: torch.dtype, *, rounded: bool = False) -> "Precision":
        """Return the precision of a model on a GPU before loading; `rounded`: more bits would not help its coarse weights."""
        is_narrow = hidden_size <= MAX_NARROW_HIDDEN_SIZE and dtype.itemsize == 2 and not rounded
        return cls(dtype, torch.float32 if is_narrow else dtype, dtype)

    def after_loading(self, norms: Sequence[RMSNorm | None], linears: Sequence[Any]) -> "Precision":
        """Return the final precision, with float16 for normed hidden states where that is safe.

        Safe: products return more than the model's dtype, the outputs of `norms` (None: not normed) stay in the range of float16, and the weights of
        `linears`, which are multiplied with them, survive the conversion. They are then converted.
        """
        if self.products == self.model or self.normed == torch.float16:
            return self
        if not all(norm and _output_bound(norm.weight) < FLOAT16_MAX for norm in norms):
            reason = "the inputs of products may be too large"
        elif not all(_fits_float16(linear.weight) for linear in linears):
            reason = "a weight does not fit"
        else:
            for linear in linears:
                linear.weight = linear.weight.to(torch.float16)
            return replace(self, normed=torch.float16)
        log.info("normed hidden states are not float16", instead=str(self.normed), reason=reason)
        return self


def _output_bound(norm: Tensor) -> float:
    """Return a bound of the outputs of a norm with weight `norm` [hidden]: no value exceeds √hidden times its row's RMS."""
    return math.sqrt(len(norm)) * float(norm.abs().max())


def _fits_float16(weight: Tensor) -> bool:
    """Return True if `weight` is finite in float16 and loses at most MAX_LOSS. Small values lose bits: bfloat16 has smaller ones."""
    half = weight.to(torch.float16)
    lost = torch.linalg.vector_norm(half.to(weight.dtype) - weight, dtype=torch.float32)
    return bool(half.isfinite().all()) and bool(
        lost <= MAX_LOSS * torch.linalg.vector_norm(weight, dtype=torch.float32)
    )
