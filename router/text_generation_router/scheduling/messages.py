"""The values that enter and leave the scheduler: replica specs, step results; orders, deliveries."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.copies import Copy, CopyEnd
from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.request import Request, RequestId, TokenId


class JoinReason(Enum):
    """The reason why queued requests joined running ones: see `Policy.join_reason`. The values are TGI's."""

    BACKPRESSURE = "backpressure"
    WAIT_EXCEEDED = "wait_exceeded"
    CHUNKING = "chunking"


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The capacity of a replica, as reported when it joins."""

    num_slots: int
    num_blocks: int
    block_size: int
    """Tokens per KV block."""
    self_scheduling: bool = False
    """The engine batches by itself: it gets whole prompts, no chunks and no blocks."""
    reserves_max_length: bool = False
    """The engine starts a sequence only if the KV blocks for prompt + max_new_tokens are free."""
    keeps_states: bool = False
    """The model has states beside KV blocks, and no group for them: no prefix is reused."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that it holds."""
    max_loras: int = 0
    """Most different adapters of its sequences; 0: no limit."""
    further_groups: tuple[CacheGroup, ...] = ()
    """The groups of its cache after the first, which is full and has `num_blocks`."""
    tokens_per_step: int = 1
    """Most new tokens of a sequence in a step."""
    host_cache: str = ""
    """The names of the memory of its host cache, which others may share, and of what it holds: "memory/contents"; "": there is none."""
    host_blocks: int = 0
    """Blocks of the first group in the host cache."""
    rank: int = 0
    """The number of this rank of the engine, from 0 on."""
    ranks: int = 1
    """Ranks of a self-scheduling engine: each has slots and KV blocks of its own, and is a replica."""
    shard: int = 0
    """The number as a replica of the first rank of the engine, if it has several."""

    @property
    def slots(self) -> range:
        """The slots of this rank among those of the shard."""
        return range(self.rank * self.num_slots, (self.rank + 1) * self.num_slots)

    @property
    def host_groups(self) -> tuple[CacheGroup, ...]:
        further = (replace(group, num_blocks=group.host_blocks, host_blocks=0) for group in self.further_groups)
        return CacheGroup(self.host_blocks), *further

    def holds(self, adapter: str) -> bool:
        """Return True if it computes sequences with this adapter; "" is the model alone."""
        return not adapter or adapter in self.adapters

    def fits(self, positions: int, adapter: str) -> bool:
        """Return True if a sequence of so many positions could run alone, with this adapter."""
        if positions > self.num_tokens or not self.holds(adapter):
            return False
        size = self.block_size
        for group in self.further_groups:
            if positions > group.num_blocks * size and group.blocks_held(positions, size) > group.num_blocks:
                return False
        return True

    @property
    def num_tokens(self) -> int:
        """The size of the KV cache, in tokens: that of its first group."""
        return self.num_blocks * self.block_size


FurtherBlocks = tuple[int, tuple[int, ...]]
"""Blocks of a sequence in a group after the first: the index of the first one, and their numbers."""
Allocations = list[tuple[int, tuple[int, ...]]]
"""(slot, additional KV blocks) of one group; (slot, (position, block)) of a group of states."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A sequence that starts in a slot of a replica."""

    slot: int
    request: Request
    generated: tuple[TokenId, ...]
    """New tokens from before a preemption or move; they follow the prompt."""
    blocks: tuple[int, ...]
    cached_tokens: int = 0
    """Leading tokens whose KV is already in `blocks`."""
    further_blocks: tuple[FurtherBlocks, ...] = ()
    """The blocks of each group after the first."""
    own_cached_tokens: int = 0
    """Cached tokens that the same tenant computed or reused before. A client learns of no others."""
    rank: int | None = None
    """The rank of the engine that computes it, if that has several."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The changes of one replica at its next step boundary: orders, before they are put on the wire."""

    number: int
    release: tuple[int, ...] = ()
    """Slots to free."""
    placements: tuple[Placement, ...] = ()
    allocations: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(slot, additional KV blocks)."""
    further_allocations: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...] = ()
    """The allocations of each group after the first."""
    prefill: tuple[tuple[int, int], ...] = ()
    """(slot, prompt tokens to compute in the next step)."""
    join_reason: JoinReason | None = None
    """The reason why placements join running sequences; None without both."""
    copies: tuple[Copy, ...] = ()
    """Copies between the device and the host cache to begin."""

    def joined(self, other: "SchedulerOutput") -> "SchedulerOutput":
        """Return these orders and those for another rank of the same engine, which have the same number, as one."""
        return replace(
            self,
            release=self.release + other.release,
            placements=self.placements + other.placements,
            join_reason=self.join_reason or other.join_reason,
        )


@dataclass(slots=True)
class StepOutput:
    """The results of a step in columns: slots[i] got the next token_counts[i] of token_ids (no counts: one token each)."""

    orders_applied: int
    slots: Sequence[int] = ()
    token_counts: Sequence[int] = ()
    token_ids: Sequence[TokenId] = ()
    finished: dict[int, FinishReason] = field(default_factory=dict)
    failed: dict[int, tuple[FailureCode, str]] = field(default_factory=dict)
    prefilled: Sequence[tuple[int, int]] = ()
    """(slot, prompt tokens computed)."""
    cached: Sequence[tuple[int, int]] = ()
    """(slot, prompt tokens that a self-scheduling engine found in its own prefix cache)."""
    step_s: float = 0.0
    """Duration in seconds; 0 if no step was made."""
    steps: int = 1
    """Number of steps covered."""
    copied: Sequence[CopyEnd] = ()
    """Copies that have ended."""
    token_starts: Sequence[int] = ()
    """The index of the first token of each slot; (): they follow one another."""


class Failed(NamedTuple):
    """A request that ended with an error."""

    request_id: RequestId
    kind: FailureCode
    message: str


@dataclass(slots=True)
class Deliveries:
    """New tokens and errors for the listeners of requests."""

    tokens: list[tuple[RequestId, int, int, FinishReason | None]] = field(default_factory=list)
    """(request, start, end, finish reason if the last token ended it): token_ids[start:end] of the step output."""
    failed: list[Failed] = field(default_factory=list)
    moved: list[RequestId] = field(default_factory=list)
    """Running requests that lost their replica. They continue on another one, unless they are among `failed`."""
    cached: list[tuple[RequestId, int]] = field(default_factory=list)
    """(request, cached prompt tokens of which its client may learn)."""

    def extend(self, others: "Deliveries") -> None:
        """Append those of another replica, or of another rank of an engine, whose tokens are in the same step output."""
        self.tokens += others.tokens
        self.failed += others.failed
        self.moved += others.moved
        self.cached += others.cached
