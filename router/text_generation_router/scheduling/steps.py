"""What crosses the border of the scheduling core: orders out, outcomes in, deliveries out. Values, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.request import Request, RequestId, TokenId


class JoinReason(Enum):
    """Why entries left the queue while others ran; the values are TGI's words."""

    BACKPRESSURE = "backpressure"
    """As many waited as the waiting-served ratio wants."""
    WAIT_EXCEEDED = "wait_exceeded"
    """They had waited so many steps that the ratio no longer counts."""
    CHUNKING = "chunking"
    """Nothing held them back: prompts are computed in chunks beside what decodes."""


@dataclass(frozen=True, slots=True)
class Admission:
    """An entry that leaves the queue for a slot."""

    slot: int
    request: Request
    generated: tuple[TokenId, ...]
    """Tokens it generated before it was preempted; they follow the prompt."""
    blocks: tuple[int, ...]
    cached_tokens: int = 0
    """Leading tokens whose KV sits in `blocks` already."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica can hold, as it says when it joins."""

    num_slots: int
    num_blocks: int
    block_size: int
    self_scheduling: bool = False
    """Its engine batches by itself: it gets whole prompts, and neither chunks nor blocks."""
    reserves_longest: bool = False
    """It begins with a sequence only once all the blocks are free that this may come to need."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a replica is to change at one step boundary."""

    number: int
    release: tuple[int, ...] = ()
    admit: tuple[Admission, ...] = ()
    grants: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(slot, KV blocks to grow into)."""
    prefill: tuple[tuple[int, int], ...] = ()
    """(slot, prompt tokens to compute in the next step)."""
    joined: JoinReason | None = None
    """Why those of `admit` joined running entries; None if they join none."""


@dataclass(slots=True)
class Outcome:
    """What a step brought, in columns: slots[i] got the next token_counts[i] of token_ids (empty counts: one each)."""

    orders_applied: int
    slots: Sequence[int] = ()
    token_counts: Sequence[int] = ()
    token_ids: Sequence[TokenId] = ()
    finished: dict[int, FinishReason] = field(default_factory=dict)
    failed: dict[int, tuple[FailureCode, str]] = field(default_factory=dict)
    prefilled: Sequence[tuple[int, int]] = ()
    """(slot, prompt tokens computed)."""
    step_s: float = 0.0
    """Seconds the step took; 0: no step was made."""
    steps: int = 1
    """Steps it stands for."""


@dataclass(frozen=True, slots=True)
class Failed:
    """One request that ended with an error."""

    request_id: RequestId
    kind: FailureCode
    message: str


@dataclass(slots=True)
class Deliveries:
    """Who is to hear what. Tokens are named by where they stand in the outcome's columns."""

    tokens: list[tuple[RequestId, int, int, FinishReason | None]] = field(default_factory=list)
    """(request, first token, end, reason if the last of them ended it)."""
    failed: list[Failed] = field(default_factory=list)
