"""Setup: what is simulated, but for the clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_bench.simulator.ledger import Targets
from text_generation_bench.simulator.machine import Machine
from text_generation_router.scheduling.policy import Policy


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica that is lost, and comes back empty."""

    at: float
    replica: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated, but for the clients."""

    machine: Machine
    policy: Policy
    replicas: int
    targets: Targets
    ids: tuple[int, ...]
    """The pool that answers are cut from."""
    until: float = math.inf
    """When clients send nothing more."""
    outages: Sequence[Outage] = ()
    blind: bool = False
    """Whether the scheduler is told nothing of tenants, classes and deadlines."""
    with_fairness: bool = False
    """Whether service is counted by tenant."""
    audited: bool = False
    """Whether the content of every KV block is checked at every step."""
    most_steps: int = 1 << 20
    """Steps of a span, however little happens; 1: every step is an event of its own."""
