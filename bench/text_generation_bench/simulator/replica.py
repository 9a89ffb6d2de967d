"""Replica: one simulated shard, and what is on its way to it."""

from __future__ import annotations

from text_generation_bench.simulator.arrivals import Arrival
from text_generation_bench.simulator.checks import KvAudit
from text_generation_bench.simulator.shard import SimulatedShard
from text_generation_router.request import RequestId
from text_generation_router.scheduling.steps import Orders


class Replica:
    """What the world knows of one replica; the world alone changes it."""

    __slots__ = (
        "acknowledged",
        "arrivals",
        "at_boundary",
        "audit",
        "deciding",
        "end_at",
        "holds",
        "index",
        "is_open",
        "orders",
        "orders_at",
        "session",
        "shard",
        "step_seconds",
        "version",
    )

    def __init__(self, index: int, shard: SimulatedShard, audit: KvAudit | None) -> None:
        self.index = index
        self.shard = shard
        self.audit = audit
        self.is_open = False
        self.session = 0
        self.reset()

    def reset(self) -> None:
        """A new session: nothing is held, and nothing is on its way."""
        self.session += 1
        self.shard.clear()
        if self.audit is not None:
            self.audit.clear()
        self.orders: Orders | None = None
        self.orders_at = 0.0
        self.arrivals: dict[RequestId, Arrival] = {}
        self.acknowledged = 0
        """The last orders that the scheduler knows to be applied."""
        self.deciding = False
        """Whether a decision is held back."""
        self.holds = 0
        self.at_boundary = False
        self.end_at = -1.0
        self.version = 0
        """Of the event that ends the span; those of older versions are void."""
        self.step_seconds = (0.0, 0.0)
