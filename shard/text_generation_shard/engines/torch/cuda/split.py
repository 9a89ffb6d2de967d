"""A place in a tensor-parallel group, and which part of each matrix is held there."""

from __future__ import annotations

from dataclasses import dataclass

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.cuda.linear import Span


@dataclass(frozen=True, slots=True)
class Split:
    """Which of how many ranks this is."""

    rank: int = 0
    size: int = 1

    def even(self, total: int, what: str) -> Span:
        """This rank's equal part of `total`, counted in the unit that `what` names."""
        if total % self.size:
            raise EngineError(f"{total} {what} cannot be divided among {self.size} shards")
        length = total // self.size
        return Span(self.rank * length, length, total)

    def kv_heads(self, total: int) -> Span:
        """Equal parts; with more ranks than heads, each head is on several ranks, beside the queries that look at it."""
        if self.size > total and self.size % total == 0:
            return Span(self.rank * total // self.size, 1, total)
        return self.even(total, "key-value heads")

    def padded(self, total: int) -> Span:
        """Equal parts of `total` rounded up; the last ranks may have less of it, or nothing."""
        length = -(-total // self.size)
        start = min(self.rank * length, total)
        return Span(start, min(length, total - start), total)
