"""The state of all replicas at one moment, for /info."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from text_generation_router.scheduling.scheduler import SchedulerStats


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A shard that is a member."""

    replica: int
    address: str
    state: Literal["joining", "serving", "hung", "draining", "taken", "refused"]
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The statistics of the scheduler, and the shards."""

    stats: SchedulerStats
    members: Sequence[MemberInfo]
