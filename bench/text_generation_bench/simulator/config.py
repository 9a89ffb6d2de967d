"""Configuration of a simulation: replicas, policy, outages; and the scheduling policies that are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType

from text_generation_bench.simulator.autoscaling import Rule, by_average, by_value
from text_generation_bench.simulator.cost_model import CostModel
from text_generation_router.scheduling.chunking import PendingPrompts
from text_generation_router.scheduling.jobs import PrefixJobs
from text_generation_router.scheduling.kv_cache import KVCache
from text_generation_router.scheduling.messages import Deliveries, ReplicaSpec
from text_generation_router.scheduling.policy import Dispatch, Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.sequence import ScheduledSequence

HOST_SHARE = 4.0
"""KV caches of all replicas that the host cache of `host-cache` holds."""


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Latencies of a well-served request, in seconds."""

    ttft_s: float
    itl_s: float
    """99 % of the gaps between its tokens are no longer."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The loss of a replica, which comes back empty after `seconds`."""

    at: float
    replica: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Everything that is simulated except the clients."""

    cost_model: CostModel
    policy: Policy
    replicas: int
    targets: LatencyTargets
    ids: tuple[int, ...]
    """The token pool that answers are taken from."""
    until: float = math.inf
    """Time after which clients send nothing more."""
    outages: Sequence[Outage] = ()
    blind: bool = False
    """Hide tenants, priorities and deadlines from the scheduler."""
    with_fairness: bool = False
    """Count service per tenant."""
    scheduler: Callable[[Policy, int], Scheduler] = Scheduler
    scaling: Sequence[Rule] = ()
    """Rules of an autoscaler, which has at most `replicas`; without rules all of them run all the time."""
    audited: bool = False
    """Check the content of every KV block at every step."""
    max_span_steps: int = 1 << 20
    """Most steps of a span; 1: each step is an event of its own."""


@dataclass(frozen=True, slots=True)
class PolicyVariant:
    """A scheduling policy to compare."""

    policy: Policy
    blind: bool = False
    """Hide tenants, priorities and deadlines from the scheduler."""
    scheduler: Callable[[Policy, int], Scheduler] = Scheduler
    scaling: Sequence[Rule] = ()
    """Rules by which replicas are started and stopped."""
    host_share: float = 0.0
    """Size of the host cache, in KV caches of all replicas; 0: there is none."""


class _TgiCache(KVCache):
    """A KV cache that keeps prompts only, and only once their request has ended."""

    def commit(self, sequence: ScheduledSequence, computed: int) -> None:
        pass

    def free(self, sequence: ScheduledSequence) -> None:
        super().commit(sequence, min(sequence.num_kv_tokens, len(sequence.request.prompt)))
        super().free(sequence)


class _TgiPrompts(PendingPrompts):
    """Pending prompts for which no other sequence waits."""

    def longest_shared(self, sequence: ScheduledSequence) -> tuple[int, ScheduledSequence | None]:
        return 0, None


class _NoJobs(PrefixJobs):
    """Finds no job by its prompts."""

    def name(self, sequence: ScheduledSequence) -> str:
        return ""


class FcfsScheduler(Scheduler):
    """A scheduler without jobs."""

    def __init__(self, policy: Policy, replicas: int) -> None:
        super().__init__(policy, replicas)
        self.queue.prefix_jobs = _NoJobs()


class TgiScheduler(FcfsScheduler):
    """A scheduler that reserves blocks and caches prompts as TGI 3 does."""

    def open(self, replica: int, spec: ReplicaSpec) -> Deliveries:
        deliveries = super().open(replica, replace(spec, reserves_max_length=True))
        scheduler = self.replicas[replica]
        assert scheduler is not None
        scheduler.cache = _TgiCache(replace(spec, further_groups=()), prefix_caching=self.policy.prefix_caching)
        scheduler.prompts = _TgiPrompts(spec.block_size, self.policy.max_batch_prefill_tokens)
        return deliveries


def _ours(model: CostModel, max_queued_tokens: int | None) -> PolicyVariant:
    return PolicyVariant(
        Policy(
            max_batch_prefill_tokens=model.prefill_budget,
            max_batch_size=model.slots,
            target_itl_s=model.target_itl_s,
            max_queued_tokens=max_queued_tokens,
            growth_tokens=model.growth_tokens,
        )
    )


def _ours_with(**changes: object) -> Callable[[CostModel, int | None], PolicyVariant]:
    def build(model: CostModel, max_queued_tokens: int | None) -> PolicyVariant:
        ours = _ours(model, max_queued_tokens)
        return replace(ours, policy=replace(ours.policy, **changes))  # type: ignore[arg-type]

    return build


def _fcfs(model: CostModel, max_queued_tokens: int | None) -> PolicyVariant:
    return replace(_ours(model, max_queued_tokens), blind=True, scheduler=FcfsScheduler)


def _tgi(model: CostModel, max_queued_tokens: int | None) -> PolicyVariant:
    ours = _ours(model, max_queued_tokens).policy
    policy = replace(ours, target_itl_s=None, dispatch=Dispatch.ROUND_ROBIN)
    return PolicyVariant(policy, blind=True, scheduler=TgiScheduler)


def _with_host(model: CostModel, max_queued_tokens: int | None) -> PolicyVariant:
    return replace(_ours(model, max_queued_tokens), host_share=HOST_SHARE)


def _two_roles(model: CostModel, max_queued_tokens: int | None) -> PolicyVariant:
    host = _with_host(model, max_queued_tokens)
    return replace(host, policy=replace(host.policy, prefill_replicas=1))


def _scaled(*rules: Rule) -> Callable[[CostModel, int | None], PolicyVariant]:
    return lambda model, max_queued_tokens: replace(_ours(model, max_queued_tokens), scaling=rules)


POLICIES: Mapping[str, Callable[[CostModel, int | None], PolicyVariant]] = MappingProxyType(
    {
        "ours": _ours,
        "host-cache": _with_host,
        "two-roles": _two_roles,
        "no-reuse": _ours_with(prefix_caching=False),
        "no-target": _ours_with(target_itl_s=None),
        "fcfs": _fcfs,
        "least-loaded": _ours_with(dispatch=Dispatch.LEAST_LOADED),
        "round-robin": _ours_with(dispatch=Dispatch.ROUND_ROBIN),
        "random": _ours_with(dispatch=Dispatch.RANDOM),
        "tgi": _tgi,
        "signals": _scaled(by_value(attrgetter("queue_seconds"), 2.0), by_value(attrgetter("busy_ratio"), 0.6)),
        "cpu": _scaled(by_value(attrgetter("cpu_use"), 0.8)),
        "queue-length": _scaled(by_average(attrgetter("waiting"), 5.0)),
    }
)
"""Functions of the cost model and the queue limit, by name."""
