"""The inputs of kernels that are the same in all layers of a step. A group on CPUs has them too, without Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeStep:
    """The inputs of the rotation that are the same in all layers of a step."""

    positions: Tensor
    """int32 [tokens]."""
    slots: Tensor
    """int32 [tokens]."""
    block_tables: Tensor
    """int32 [slots, blocks]."""
    table: Tensor
    """float32 [max_positions, 2, head_dim / 2], of `RotaryEmbedding`."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Epsilon of the query and key norms."""
    query_beta: float = 0.0
    """Rotated queries are multiplied by 1 + query_beta · ln(1 + ⌊position / query_period⌋)."""
    query_period: int = 1
    norms_values: bool = False
    """True: values are normed too, without a weight."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The inputs of decode attention that are the same in all layers of a step."""

    positions: Tensor
    """int32 [T]: the token attends to keys 0 … position."""
    slots: Tensor
    """int32 [T]: row of the block table."""
    block_tables: Tensor
    """int32 [slots, blocks of the longest sequence]."""
    scale: float
    """Factor of the products of query and key, usually 1 / √head_dim."""
    softcap: float | None = None
    """If given, scores s become softcap · tanh(s / softcap)."""
