"""How many bits a forward pass keeps of what lies between its products.

A step of a wide model takes as long as its bytes take to move and its multiplications to be powered. One of a narrow model takes
as long as its kernels take to start: more bits cost it nothing, so far as they cost no kernel. So there products leave float32, as
they are summed, and normed hidden states are float16, with eleven significant bits where bfloat16 has eight.

float16 ends at 65,504. A norm's outputs cannot get there, whatever the norm is of; what attention and the gated activation
make can, and keeps the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
import torch
from torch import Tensor

from text_generation_shard.engines.torch.model_config import ModelConfig

NARROW = 1024
"""Hidden size up to which a model is narrow."""
FLOAT16_MAX = torch.finfo(torch.float16).max
LOSS = 2.0**-13
"""What a weight may lose on its way to float16, of its norm: less than its inputs lose."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Precision:
    """In which dtypes a forward pass computes, besides the residual stream and the logits, which are float32."""

    model: torch.dtype
    """Of weights as they are loaded, the KV cache, queries, and what attention and the activation leave."""
    products: torch.dtype
    """Of what the products of a layer leave."""
    normed: torch.dtype
    """Of normed hidden states and the weights that they are multiplied with."""

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> Precision:
        """For a model whose weights are not loaded yet. A checkpoint in FP8 is rounded far more coarsely than all of this."""
        is_narrow = config.hidden_size <= NARROW and config.quantization is None and dtype.itemsize == 2
        return cls(dtype, torch.float32 if is_narrow else dtype, dtype)

    def sealed(self, norms: Sequence[Tensor], weights: Sequence[Tensor]) -> Precision:
        """The same, or with float16 for normed hidden states: where products leave more than the model's dtype, `norms`
        [hidden] cannot leave the range of float16, and `weights`, which their outputs are multiplied with, survive it."""
        if self.products == self.model or self.normed == torch.float16:
            return self
        if not all(_largest(norm) < FLOAT16_MAX for norm in norms):
            reason = "a norm's outputs may be too large"
        elif not all(_survives(weight) for weight in weights):
            reason = "a weight does not fit"
        else:
            return replace(self, normed=torch.float16)
        log.info("normed hidden states are not float16", instead=str(self.normed), reason=reason)
        return self


def _largest(norm: Tensor) -> float:
    """A bound of what a norm of the weight `norm` [hidden] leaves: no value of a row is above √hidden times its root mean square."""
    return math.sqrt(len(norm)) * float(norm.abs().max())


def _survives(weight: Tensor) -> bool:
    """Whether it is finite in float16, and loses no more than LOSS. Small values lose bits there, and bfloat16 has smaller ones."""
    half = weight.to(torch.float16)
    lost = torch.linalg.vector_norm(half.to(weight.dtype) - weight, dtype=torch.float32)
    return bool(half.isfinite().all()) and bool(lost <= LOSS * torch.linalg.vector_norm(weight, dtype=torch.float32))
