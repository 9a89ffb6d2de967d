"""The operator's limits and choices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from text_generation_router.request import TenantId
from text_generation_router.scheduling.messages import JoinReason


class Dispatch(Enum):
    """The rule by which a replica is chosen among those with room."""

    PREFIX = "prefix"
    """Longest cached prefix minus pending work: see `dispatch`."""
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's limits and choices, the same for all replicas."""

    max_batch_prefill_tokens: int
    """Token budget: prompt tokens computed in one step, over all chunks."""
    max_batch_size: int
    """Sequences running at once on a replica."""
    waiting_served_ratio: float = 0.0
    """Place queued requests only once the queue holds this share of the running sequences; 0: always."""
    max_waiting_tokens: int = 20
    """Steps without a placement after which the ratio no longer counts: `--max-waiting-tokens`."""
    target_itl_s: float | None = None
    """Target for the duration of steps that decode and prefill; None: only the token budget limits chunks."""
    chunk_tokens: int | None = None
    """Without a target: prompt tokens in a step beside as many decoding sequences as prompts that wait; None: the budget."""
    prefix_caching: bool = True
    dispatch: Dispatch = Dispatch.PREFIX
    tenant_weights: Mapping[TenantId, float] = field(default_factory=dict)
    """Shares of tenants, if not 1.0."""
    max_queued_tokens: int | None = None
    """Tokens of work that may wait; None: no limit."""
    max_queued_caches: int | None = None
    """The same, in sizes of the KV caches of all replicas, and in place of it; None: no such limit."""
    prefill_replicas: int = 0
    """Replicas that compute prompts for the others of their host, which decode: see `roles`. 0: each does both."""
    max_request_moves: int = 2
    """Consecutive replica losses without a new token in between that a request survives."""
    growth_tokens: int = 64
    """Free positions that a block allocation restores if the pool has enough blocks."""

    def may_place(self, *, waiting: int, running: int, steps_since_placement: int) -> bool:
        """True if queued requests may join the next step (TGI, backends/v3 `batching_task`)."""
        if running == 0 or steps_since_placement >= self.max_waiting_tokens:
            return True
        return waiting >= int(running * self.waiting_served_ratio)

    def join_reason(self, *, running: int, steps_since_placement: int) -> JoinReason | None:
        """Return why placed requests may join `running` sequences; None without any."""
        if not running:
            return None
        if int(running * self.waiting_served_ratio) == 0:
            return JoinReason.CHUNKING  # no ratio is set: prompts are computed in chunks beside decoding
        if steps_since_placement >= self.max_waiting_tokens:
            return JoinReason.WAIT_EXCEEDED
        return JoinReason.BACKPRESSURE
