"""StepObserver: the interface by which metrics observe orders and steps of replicas."""

from collections.abc import Container
from typing import NamedTuple, Protocol

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.request import RequestId
from text_generation_router.scheduling.messages import Deliveries, SchedulerOutput


class StepRecord(NamedTuple):
    """A step report and how it was handled."""

    replica: int
    report: pb.StepReport
    steps: int
    """Steps covered; 0 if it only acknowledges orders."""
    deliveries: Deliveries
    received: float
    """Seconds of the monotonic clock."""
    update_s: float
    """Seconds the scheduler took to record it."""
    deliver_s: float
    """Seconds it took to detokenize and to write to clients."""
    alive: Container[RequestId]
    """Requests that continue."""


class StepObserver(Protocol):
    """Observes the end of sessions, orders and reports of all replicas. Called on the event loop; must neither block nor raise."""

    def on_loss(self, replica: int) -> None: ...
    def on_report(self, record: StepRecord) -> None: ...
    def on_orders(self, orders: SchedulerOutput, seconds: float) -> None:
        """Handle orders that took `seconds` to schedule and are being sent."""
