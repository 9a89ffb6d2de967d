"""Prometheus metrics: TGI's under TGI's names, so that its dashboards and alerts go on working; and our own.

    instruments ◄── requests   generations: asked for, ended, how long     told by api/http/record.py
                ◄── steps      what the shard did, step by step            told by shards/replica.py
                ◄── pool       queue, slots, KV blocks                     read when scraped

Nothing is counted token by token: the work is a step's, or a request's.
"""

from __future__ import annotations

from text_generation_router.metrics.pool import pool_figures, pool_status
from text_generation_router.metrics.requests import RequestMetrics, Spent
from text_generation_router.metrics.steps import StepMetrics
from text_generation_router.scheduling.scheduler import Scheduler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

__all__ = ["CONTENT_TYPE", "Metrics", "RequestMetrics", "Spent"]


class Metrics:
    """Every metric of the router."""

    def __init__(self, *, max_input_tokens: int, max_total_tokens: int, scheduler: Scheduler) -> None:
        self.requests = RequestMetrics(max_input_tokens, max_total_tokens)
        """Told of every generation."""
        self.steps = StepMetrics()
        """Told of every step."""
        self._scheduler = scheduler
        self._instruments = [*self.requests.instruments(), *self.steps.instruments(), *pool_figures(scheduler)]

    def status(self) -> dict[str, object]:
        """What /info tells of the replicas and their prefix caches."""
        return pool_status(self._scheduler)

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return "".join(f"{line}\n" for one in self._instruments for line in one.lines()).encode()
