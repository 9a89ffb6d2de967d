"""Policy: what a step may spend, when the queue may move, and where to. Pure questions over numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from text_generation_router.request import TenantId
from text_generation_router.scheduling.steps import JoinReason


class Dispatch(Enum):
    """How a replica is chosen for a request, among those that have room for it."""

    PREFIX = "prefix"
    """The longest cached prefix less the work that is before it: see `dispatch`."""
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's limits and choices."""

    max_batch_prefill_tokens: int
    """Prompt tokens computed in one step, over all chunks."""
    max_batch_size: int
    """Entries running at once on a replica."""
    waiting_served_ratio: float = 0.0
    """Admit only once the queue holds this share of the running entries; 0: always."""
    max_decode_steps_between_prefills: int = 20
    """Steps without an admission after which the ratio no longer counts; `--max-waiting-tokens`."""
    target_itl_s: float | None = None
    """Time between two tokens that prompts beside them may stretch it to; None: the budget alone counts."""
    prefix_caching: bool = True
    """Whether computed blocks are kept for prompts that begin alike."""
    dispatch: Dispatch = Dispatch.PREFIX
    tenant_weights: Mapping[TenantId, float] = field(default_factory=dict)
    """Shares of the tenants that have not the usual one, 1.0."""
    max_queued_tokens: int | None = None
    """Work that may wait, in tokens; None: no bound."""
    max_moves: int = 3
    """Times in a row a request may lose its replica without a new token in between, before it fails."""
    growth_tokens: int = 40
    """Tokens of room that a grant restores, if the pool has it."""
    reserve_worst_case: bool = False
    """Take the blocks of all new tokens asked for at admission, as TGI does. For comparisons."""
    publish_prompts_only: bool = False
    """Keep only prompts, and only once their request has ended, as TGI does. For comparisons."""

    def may_admit(self, *, waiting: int, running: int, steps_since_admission: int) -> bool:
        """Whether waiting entries may join the next step (TGI, backends/v3 `batching_task`)."""
        if running == 0 or steps_since_admission >= self.max_decode_steps_between_prefills:
            return True
        return waiting >= int(running * self.waiting_served_ratio)

    def join_reason(self, *, running: int, steps_since_admission: int) -> JoinReason:
        """Why waiting entries may join so many running ones, given that they may."""
        if int(running * self.waiting_served_ratio) == 0:
            return JoinReason.CHUNKING
        if steps_since_admission >= self.max_decode_steps_between_prefills:
            return JoinReason.WAIT_EXCEEDED
        return JoinReason.BACKPRESSURE
