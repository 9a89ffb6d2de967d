"""Prometheus metrics: TGI's under TGI's names, so that its dashboards and alerts keep working, and our own.

    instruments ◄── requests   generations: requested, finished, latencies     updated by api/http/record.py
                ◄── steps      steps of the shards, GPUs of the replicas       updated by shards/replica.py
                ◄── connections  HTTP connections                              updated by web/connections.py
                ◄── scheduler  queue, slots, KV blocks, replicas               read when scraped
                ◄── further    the names of vLLM and TensorRT-LLM for these    read when scraped
    errors         the last errors, for the dashboard                          updated by api/http/record.py
    snapshots      the counts of HTTP workers, added up in the scheduler process

To add a metric, add its instrument to the registry, in one of these modules, and update it at the call site. Nothing is
counted per token: the cost is per step or per request.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from text_generation_common.logs import dropped_lines
from text_generation_router.admission_queue import PendingWork
from text_generation_router.audit.auditor import Auditor
from text_generation_router.audit.served import FEATURES
from text_generation_router.audit.verdict import Verdict
from text_generation_router.metrics.connections import ConnectionMetrics
from text_generation_router.metrics.errors import RecentErrors
from text_generation_router.metrics.further import add_further_names
from text_generation_router.metrics.instruments import Reading, Readings, Registry
from text_generation_router.metrics.requests import Latencies, RequestMetrics
from text_generation_router.metrics.scheduler import SchedulerMetrics
from text_generation_router.metrics.snapshots import snapshot
from text_generation_router.metrics.steps import StepMetrics
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.member import ShardState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
SCRAPE_SLICE_S = 0.0003
"""Time for which metrics are written before tokens are delivered again."""

__all__ = ["CONTENT_TYPE", "OPENMETRICS", "HttpMetrics", "Latencies", "Metrics", "RequestMetrics"]


class HttpMetrics:
    """The metrics of HTTP: generations, connections, and the work before the queue."""

    def __init__(self, *, max_input_tokens: int, max_total_tokens: int) -> None:
        self.registry = Registry()
        self.stage = PendingWork()
        """The work before the queue; set when its workers start."""
        self.requests = RequestMetrics(self.registry, max_input_tokens, max_total_tokens)
        self.connections = ConnectionMetrics(self.registry)
        self.registry.add(
            Reading,
            "text_generation_preparation_characters",
            "Characters of requests that wait to be tokenized, rendered or compiled",
            lambda: self.stage.waiting,
        )
        self.registry.add(
            Reading,
            "text_generation_log_lines_dropped_total",
            "Log lines that the processes of the router dropped because the log was full, closed or too slow",
            dropped_lines,
            "counter",
        )
        self.errors = RecentErrors()
        self._process = time.time_ns()
        """The number of this process, for WorkerSums."""

    def snapshot(self) -> bytes:
        """Return the counts of this process, for WorkerSums."""
        return snapshot(self._process, self.registry, self.errors)


class Metrics(HttpMetrics):
    """Every metric of the router. In a scheduler process the metrics of HTTP are the sums over its workers."""

    def __init__(self, *, max_input_tokens: int, max_total_tokens: int, scheduler: Scheduler) -> None:
        super().__init__(max_input_tokens=max_input_tokens, max_total_tokens=max_total_tokens)
        self._scheduler = scheduler
        self.steps = StepMetrics(self.registry)
        self.registry.add(SchedulerMetrics, scheduler)

    def add_shards(self, cluster: Cluster[Any], known: Callable[[], int]) -> None:
        """Add the metrics of the states of shards; `known` returns how many there are, those of other routers included."""
        self.registry.add(
            Readings,
            "text_generation_shards",
            "Shards that are members, by state",
            *("state", [state.value for state in ShardState]),
            lambda: Counter(member.state.value for member in cluster.members),
        )
        self.registry.add(
            Reading,
            "text_generation_shards_known",
            "Shards that the source lists, those of other routers included",
            known,
        )

    def add_audits(self, auditor: Auditor) -> None:
        self.registry.add(
            Readings,
            "text_generation_audits_total",
            "Audited requests, by verdict",
            *("verdict", [*Verdict], lambda: auditor.verdicts, "counter"),
        )
        self.registry.add(
            Readings,
            "text_generation_audit_mismatch_total",
            "Served texts that differ from their replay, by the feature that is the likely cause",
            *("feature", [*FEATURES, "none"], lambda: auditor.mismatches, "counter"),
        )
        self.registry.add(
            Reading,
            "text_generation_audits_waiting",
            "Requests chosen for an audit that run or wait for their replay",
            lambda: auditor.waiting,
        )

    def add_names(self, names: Collection[str], model: str) -> None:
        """Show the metrics under further names too: "vllm", "trtllm"."""
        add_further_names(self.registry, self._scheduler, names, model)

    async def written(self, *, openmetrics: bool) -> bytes:
        """Every metric in Prometheus' format, or in OpenMetrics' with exemplars. Tokens are delivered between its parts."""
        body, resumed = bytearray(), time.perf_counter()
        for text in self.registry.texts(openmetrics=openmetrics):
            body += text.encode()
            if time.perf_counter() - resumed > SCRAPE_SLICE_S:
                await asyncio.sleep(0)
                resumed = time.perf_counter()
        return bytes(body)
