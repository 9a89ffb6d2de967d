"""Snapshots of the metrics of an HTTP worker, and their sum in the scheduler process.

    worker       snapshot(…) ──► bytes: all that it has counted since it started
    scheduler    WorkerSums.update ──► adds the difference to the worker's last snapshot to instruments of the same names

So the scheduler process has the figures that one process would have. A counter never falls because a worker ended: what
it had counted by its last snapshot has been added. Its gauges are taken off, and the generations that it ran count as
failed. Zeros are left out of a snapshot. The next scheduler process starts with what the workers have counted.
"""

from dataclasses import astuple
from typing import Any

import orjson

from text_generation_router.metrics.errors import RecentError, RecentErrors
from text_generation_router.metrics.instruments import Reading, Registry
from text_generation_router.metrics.requests import RequestMetrics


def snapshot(process: int, registry: Registry, errors: RecentErrors) -> bytes:
    """Return the counts of this process; `process` is a number that no earlier process of the worker had."""
    values = {each.name: value for each in registry.summable() if (value := each.snapshot()) is not None}
    return orjson.dumps([process, values, [astuple(error) for error in errors]])


class WorkerSums:
    """Adds the counts of workers to a registry and to the errors of this process."""

    def __init__(self, registry: Registry, requests: RequestMetrics, errors: RecentErrors) -> None:
        """`requests` are those of `registry`."""
        self._requests = requests
        self._instruments = {each.name: each for each in registry.summable()}
        self._gauges = [name for name, each in self._instruments.items() if isinstance(each, Reading)]
        self._errors = errors
        self._last: dict[int, tuple[int, dict[str, Any]]] = {}
        """By number of the worker: the number of the process that sent its last snapshot, and the values by instrument."""

    def update(self, worker: int, snapshot: bytes) -> None:
        process, values, errors = orjson.loads(snapshot)
        last, before = self._last.get(worker, (process, {}))
        if last != process:
            self.lost(worker)
            self._errors.keep(worker)
            self._requests.abandoned(before)
            before = {}
        for name in values.keys() | before.keys():
            self._instruments[name].add_difference(values.get(name), before.get(name))
        self._last[worker] = process, values
        self._errors.show(worker, [RecentError(*error) for error in errors])

    def lost(self, worker: int) -> None:
        """Take the gauges of a worker off; its counts stay. It may come back."""
        _, values = self._last.get(worker, (0, {}))
        for name in self._gauges:
            self._instruments[name].add_difference(None, values.pop(name, None))
