"""The rank in a tensor-parallel group, and its part of each matrix."""

from dataclasses import dataclass

from text_generation_shard.engine import EngineError


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The range [start, start + length) of the `total` rows or columns of a checkpoint tensor."""

    start: int
    length: int
    total: int

    @classmethod
    def whole(cls, total: int) -> "ShardRange":
        return cls(0, total, total)


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """A rank of a tensor-parallel group of `world_size` ranks."""

    rank: int = 0
    world_size: int = 1

    def even(self, total: int, what: str) -> "ShardRange":
        """Return this rank's equal part of `total`; `what` names the unit for errors."""
        if total % self.world_size:
            raise EngineError(f"{total} {what} cannot be divided among {self.world_size} shards")
        length = total // self.world_size
        return ShardRange(self.rank * length, length, total)

    def kv_heads(self, total: int) -> "ShardRange":
        """Return equal parts; with more ranks than KV heads, several ranks hold the same head, next to its query heads."""
        if self.world_size > total and self.world_size % total == 0:
            return ShardRange(self.rank * total // self.world_size, 1, total)
        return self.even(total, "key-value heads")

    def padded(self, total: int) -> "ShardRange":
        """Return equal parts of `total` rounded up; the last ranks may have less, or nothing."""
        length = -(-total // self.world_size)
        start = min(self.rank * length, total)
        return ShardRange(start, min(length, total - start), total)
