"""The sum of the metrics of several processes: as if one process had seen all events."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import orjson
from hypothesis import given
from hypothesis import strategies as st
from metric_samples import samples

from text_generation_proto.values import FinishReason
from text_generation_router.errors import Overloaded, ServingError, ToolError
from text_generation_router.metrics import Latencies
from text_generation_router.metrics.connections import CloseReason, ConnectionMetrics
from text_generation_router.metrics.errors import RecentErrors
from text_generation_router.metrics.instruments import Registry
from text_generation_router.metrics.requests import RequestMetrics
from text_generation_router.metrics.snapshots import WorkerSums, snapshot
from text_generation_router.request import TenantId

WORKERS = 3
GAUGE = "text_generation_connections"


class Process:
    """The metrics of a process that serves HTTP."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.requests = RequestMetrics(self.registry, 100, 200)
        self.connections = ConnectionMetrics(self.registry)
        self.errors = RecentErrors()

    def see(self, event: Event, now: float) -> None:
        """Count a request on a new connection."""
        self.requests.started()
        self.connections.open += 1
        self.connections.answered("/generate", event.error.status if event.error else 200)
        self.requests.input_length.observe(event.tokens)
        if event.error is None:
            seconds = event.tokens / 64  # exact in binary, so that sums are equal in any order
            latencies = Latencies(seconds, seconds, seconds, seconds * event.tokens, event.tokens, seconds, seconds)
            self.requests.succeeded(latencies, FinishReason.LENGTH, trace_id=f"{event.tokens:032x}" * event.traced)
        else:
            self.requests.failed(event.error)
            self.connections.closed(CloseReason.STALLED)
            self.errors.add(event.error, event.error.status, f"at {now}", "/generate", TenantId("a"), None, now)


class Event(NamedTuple):
    worker: int
    tokens: int
    error: type[ServingError] | None
    traced: bool


EVENTS = st.builds(
    Event,
    st.integers(0, WORKERS - 1),
    st.integers(1, 128),
    st.sampled_from([None, Overloaded, ToolError]),
    st.booleans(),
)
STEPS = st.lists(
    st.one_of(EVENTS, st.tuples(st.sampled_from(["scrape", "restart", "reconnect"]), st.integers(0, 2))),
    max_size=30,
)


@given(STEPS)
def test_the_sum_over_workers_and_their_restarts_is_what_one_process_counts(
    steps: list[Event | tuple[str, int]],
) -> None:
    one, whole, numbers = Process(), Process(), count()
    sums = WorkerSums(whole.registry, whole.requests, whole.errors)
    workers = [(next(numbers), Process()) for _ in range(WORKERS)]

    def scrape(worker: int) -> None:
        number, process = workers[worker]
        sums.update(worker, snapshot(number, process.registry, process.errors))

    last: dict[str, float] = {}
    for now, step in enumerate(steps):
        if isinstance(step, Event):
            workers[step.worker][1].see(step, now)
            one.see(step, now)
            continue
        action, worker = step
        scrape(worker)
        if action in ("restart", "reconnect"):
            sums.lost(worker)
        if action == "restart":
            one.connections.open -= workers[worker][1].connections.open
            workers[worker] = (next(numbers), Process())
        shown = samples(whole.registry)
        assert not [name for name, value in last.items() if shown[name] < value and name != GAUGE], "a counter fell"
        last = shown
    for worker in range(WORKERS):
        scrape(worker)
    assert samples(whole.registry) == samples(one.registry)
    assert sorted(whole.errors, key=str) == sorted(one.errors, key=str)
    assert [kind.at for kind in whole.errors] == [kind.at for kind in one.errors]
    written = "".join(whole.registry.texts(openmetrics=True))
    assert written.count(" # {") >= bool(
        [step for step in steps if isinstance(step, Event) and step.traced and not step.error]
    )


def test_a_snapshot_has_no_zeros_and_a_worker_that_ended_has_no_gauges() -> None:
    worker, whole = Process(), Process()
    sums = WorkerSums(whole.registry, whole.requests, whole.errors)
    assert orjson.loads(snapshot(1, worker.registry, worker.errors)) == [1, {}, []]
    worker.see(Event(0, 7, Overloaded, traced=False), 1.0)
    for _ in range(2):
        sums.update(0, snapshot(1, worker.registry, worker.errors))
    assert samples(whole.registry)[GAUGE] == 1
    sums.lost(0)
    sums.lost(0)
    shown = samples(whole.registry)
    assert (shown[GAUGE], shown["tgi_request_count"]) == (0, 1)


def test_generations_that_a_dead_worker_ran_count_as_failed() -> None:
    dead, alive, whole = Process(), Process(), Process()
    sums = WorkerSums(whole.registry, whole.requests, whole.errors)
    for _ in range(3):
        dead.requests.started()
    dead.see(Event(0, 7, None, traced=False), 1.0)
    sums.update(0, snapshot(1, dead.registry, dead.errors))
    sums.lost(0)
    sums.update(0, snapshot(2, alive.registry, alive.errors))
    shown = samples(whole.registry)
    assert (shown["tgi_request_count"], shown['tgi_request_failure{err="incomplete"}']) == (4, 3)
    assert sum(value for name, value in shown.items() if name.startswith("text_generation_requests_finished")) == 4
