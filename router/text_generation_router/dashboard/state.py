"""The state of the server as the dashboard shows it, read from what the router counts anyway, and its last hour.

Counters are sent as they are: the page computes rates and distributions over time from their differences.

A row of the last hour has the difference of two samples as JSON without zeros, about 100 bytes: each second of the last ten
minutes, and twelve seconds at a time before them.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

import orjson

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.dashboard.events import EventLog
from text_generation_router.metrics import Metrics
from text_generation_router.metrics.requests import FIRST_TOKEN_BUCKETS
from text_generation_router.metrics.steps import TOKEN_GAP_BUCKETS
from text_generation_router.scheduling.capacity import block_usage
from text_generation_router.scheduling.scheduler import SchedulerStats
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.member import ShardMember

GAUGES = ("running", "waiting")
COUNTERS = ("new_tokens", "prompt_tokens", "looked_up_tokens", "hit_tokens", "preemptions", "moves")
COUNTS = ("ended", "responses", "first_token", "token_gap")
"""Counters by key or by number of the bucket."""
WORK = ("number", "new_tokens", "steps", "step_seconds")
"""The columns of the work of replicas."""
FINE, COARSE, RECENT = (1.0, 600), (12.0, 300), (4.0, 30)
"""Seconds of a row, and the number of rows. The recent ones have the work of each replica."""

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


class History:
    """The rows of the last hour."""

    def __init__(self) -> None:
        self._fine, self._coarse = _Rows(*FINE, _difference), _Rows(*COARSE, _difference)
        self._recent = _Rows(*RECENT, _work)

    def add(self, sample: Json) -> None:
        """Add a sample. It must not change afterwards."""
        for rows in (self._fine, self._coarse, self._recent):
            rows.add(sample)

    def shown(self) -> Json:
        """Return the rows, the oldest first."""
        fine = self._fine.rows
        older = [row for at, row in self._coarse.rows if at < fine[0][0]]
        return {"rows": older + [row for _, row in fine], "work": [row for _, row in self._recent.rows]}


class _Rows:
    """Rows that take the same time each."""

    def __init__(self, period_s: float, length: int, read: Callable[[Json, Json], Json]) -> None:
        """`read` makes a row of a sample and the one of the row before."""
        self.rows = deque[tuple[float, orjson.Fragment]](maxlen=length)
        """With the time of their ends."""
        self._period_s = period_s
        self._read = read
        self._last: Json | None = None

    def add(self, sample: Json) -> None:
        now, last = sample["now"], self._last
        if last is None:
            self._last = sample
        elif now - last["now"] > self._period_s - 0.5:  # samples are a second apart
            self.rows.append((now, orjson.Fragment(orjson.dumps(self._read(sample, last)))))
            self._last = sample


def _difference(sample: Json, last: Json) -> Json:
    row: Json = {"now": sample["now"], "elapsed": round(sample["now"] - last["now"], 3)}
    row |= {name: sample[name] for name in GAUGES}
    row |= {name: sample[name] - last[name] for name in COUNTERS}
    for name in COUNTS:
        counts, before = _by_key(sample[name]), _by_key(last[name])
        row[name] = {key: grown for key, count in counts.items() if (grown := count - before.get(key, 0))}
    return {name: value for name, value in row.items() if value}


def _by_key(counts: Mapping[str, int] | Sequence[int]) -> Mapping[str, int]:
    return counts if isinstance(counts, Mapping) else {str(number): count for number, count in enumerate(counts)}


def _work(sample: Json, _: Json) -> Json:
    return {"now": sample["now"], "replicas": [[each[name] for name in WORK] for each in sample["replicas"]]}


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
