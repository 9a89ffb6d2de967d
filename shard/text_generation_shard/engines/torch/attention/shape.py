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
    chunk: int | None = None
    """Positions are divided into chunks of this length, and a token attends to its own chunk alone; None: not divided."""

    def first_position(self, position: int) -> int:
        """Return the first position that the token at `position` attends to."""
        first = 0 if self.window is None else position - self.window + 1
        return max(0, first, 0 if self.chunk is None else position // self.chunk * self.chunk)
