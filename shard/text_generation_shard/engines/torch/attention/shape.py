"""The shape of the attention of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The heads of one layer on one rank, and the positions that they attend to."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Number of positions that a token attends to, including its own; None: all."""
