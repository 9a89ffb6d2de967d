"""The state of the server as the dashboard shows it, read from what the router counts anyway, and its last hour.

Counters are sent as they are: the page computes rates and distributions over time from their differences.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

import orjson

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.dashboard.events import EventLog
from text_generation_router.dashboard.history import History
from text_generation_router.metrics import Metrics
from text_generation_router.metrics.requests import FIRST_TOKEN_BUCKETS
from text_generation_router.metrics.steps import TOKEN_GAP_BUCKETS
from text_generation_router.scheduling.capacity import block_usage
from text_generation_router.scheduling.scheduler import SchedulerStats
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.member import ShardMember

MAX_TENANTS = 20
"""Tenants shown: those with most requests."""
MAX_REPLICAS = 256
"""Replicas shown."""
WATCHING = ("/health", "/metrics", "/dashboard", "/ping")
"""Beginnings of routes by which a server is watched."""
EVENTS_S = 15.0
"""Seconds for which samples have an event: a viewer may miss some."""

BUCKETS = {"first_token": FIRST_TOKEN_BUCKETS, "token_gap": TOKEN_GAP_BUCKETS}
"""The upper bounds of the histograms in samples, in seconds."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one time, as server-sent events."""

    at: float
    """The time, in seconds of the monotonic clock."""
    common: bytes
    """For callers that may not see other tenants."""
    full: bytes
    """For operators: also tenants, errors and addresses."""


def event(name: str, data: Json) -> bytes:
    """Return a server-sent event with JSON data."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


class StateKeeper:
    """Reads the state of the server, and keeps its last hour."""

    def __init__(self, metrics: Metrics, cluster: Cluster[Any]) -> None:
        self.events = EventLog()
        self._metrics = metrics
        self._cluster = cluster
        self._history = History()
        self._last: Json = {}
        """The last sample."""

    def sample(self) -> Sample:
        """Return the state now. Called once a second."""
        now = time.monotonic()
        stats = self._cluster.scheduler.stats(now)
        self.events.observe(self._cluster.members, stats)
        common = self._last = self._common(now, stats)
        self._history.add(common)
        replicas = self._with_addresses(common["replicas"])
        full = common | {"replicas": replicas, "tenants": list(self._tenants()), "errors": list(self._errors(now))}
        return self._event("sample", now - EVENTS_S, common, full)

    def history(self) -> Sample:
        """Return the last hour and the counters at its end."""
        shown = {**self._history.shown(), "last": self._last}
        return self._event("history", 0.0, shown, shown)

    def _event(self, name: str, events_after: float, common: Json, full: Json) -> Sample:
        return Sample(
            self._last["now"],
            event(name, common | {"events": self.events.after(events_after, reasons=False)}),
            event(name, full | {"events": self.events.after(events_after, reasons=True)}),
        )

    def _common(self, now: float, stats: SchedulerStats) -> Json:
        metrics = self._metrics
        requests, steps = metrics.requests, metrics.steps
        return {
            "now": round(now, 3),
            "running": stats.running,
            "waiting": stats.waiting,
            "queue_tokens": stats.queued_tokens,
            "queue_seconds": round(stats.queue_seconds, 3),
            "busy": round(stats.busy_ratio, 3),
            "connections": metrics.connections.everywhere,
            "ended": dict(requests.finished.counts),
            "responses": self._responses(),
            "new_tokens": steps.new_tokens.counts[""],
            "prompt_tokens": steps.prompt_tokens.counts[""],
            "looked_up_tokens": stats.prompt_tokens,
            "hit_tokens": stats.hit_tokens,
            "preemptions": stats.preemptions,
            "moves": stats.moves,
            "first_token": list(requests.first_token_times.counts),
            "token_gap": list(steps.token_gaps.of().counts),
            "replicas": [self._replica(member, now) for member, _ in zip(self._cluster.members, range(MAX_REPLICAS))],  # noqa: B905 - the first ones
            "states": Counter(member.state.value for member in self._cluster.members),
        }

    def _responses(self) -> Json:
        """Return the number of responses by the first digit of their statuses, those to probes and pages left out."""
        counts = Counter[str]()
        for request, count in self._metrics.connections.requests.counts.items():
            if not request.startswith(WATCHING):
                counts[request.rpartition(" ")[2][0]] += count
        return counts

    def _replica(self, member: ShardMember, now: float) -> Json:
        connection = member.connection
        shown: Json = {
            "number": member.number,
            "state": member.state.value,
            "restarts": max(0, connection.sessions - 1),
            "new_tokens": connection.new_tokens,
            "steps": connection.steps,
            "step_seconds": round(connection.step_seconds, 3),
        }
        ranks = [each for each in map(self._cluster.scheduler.replicas.get, connection.ranks) if each is not None]
        if not ranks:
            return shown
        return shown | {
            "uptime": int(now - connection.since),
            "batch": sum(each.occupied_slots for each in ranks),
            "slots": sum(each.spec.num_slots for each in ranks),
            "kv_used": sum(each.cache.used * each.spec.block_size for each in ranks),
            "kv_cached": sum(each.cache.tree.cached_blocks * each.spec.block_size for each in ranks),
            "kv_tokens": sum(each.spec.num_tokens for each in ranks),
            "kv_groups": block_usage(each.cache for each in ranks),
            "looked_up_tokens": sum(each.prompt_tokens for each in ranks),
            "hit_tokens": sum(each.hit_tokens for each in ranks),
            "gpus": [_gpu(state) for state in self._metrics.steps.gpus.states(member.number)],
        }

    def _with_addresses(self, replicas: list[Json]) -> list[Json]:
        """Return the replicas with their addresses, and with reasons, which name addresses too."""
        members = zip(replicas, self._cluster.members, strict=False)
        return [replica | {"address": each.address, "reason": _reason(each)} for replica, each in members]

    def _tenants(self) -> Iterator[Json]:
        scheduler = self._cluster.scheduler
        tenants, ahead = scheduler.queue.tenants, Counter[str]()
        for sequence in scheduler.requests.values():
            if sequence.charged_tokens:  # for all tokens that are expected of it
                ahead[sequence.request.qos.tenant] += sequence.expected_new_tokens - len(sequence.generated)
        active = (tenant for tenant in tenants if tenant.active)
        for tenant in nlargest(MAX_TENANTS, active, key=lambda each: (each.running + each.queued, -each.number)):
            yield {
                "name": tenant.name,
                "running": tenant.running,
                "waiting": tenant.queued,
                "queue_tokens": tenant.work,
                "tokens": tenant.charged - ahead[tenant.name],
                "weight": tenant.weight,
                "share": round(tenants.share(tenant.name), 4),
            }

    def _errors(self, now: float) -> Iterator[Json]:
        for kind in self._metrics.errors:
            yield {
                "age": round(now - kind.at),
                "count": kind.count,
                "status": kind.status,
                "type": kind.error_type,
                "route": kind.route,
                "fault": kind.fault,
                "tenants": kind.tenants,
                "text": kind.text,
                "request_id": kind.http_request_id,
            }


def _reason(member: ShardMember) -> str:
    return member.reason or ("" if member.connected else str(member.loss or ""))


def _gpu(state: pb.GpuState) -> Json:
    shown: Json = {"index": state.index}
    for field in ("utilization", "memory_used_bytes", "memory_total_bytes", "power_watts", "temperature_celsius"):
        if state.HasField(field):
            shown[field] = getattr(state, field)
    return shown
