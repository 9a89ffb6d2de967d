"""Who is told of the orders replicas were sent and of the steps they made, to count them."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple, Protocol

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.request import RequestId
from text_generation_router.scheduling.messages import Deliveries, SchedulerOutput


class Handled(NamedTuple):
    """A report, and what the router did with it."""

    replica: int
    report: pb.StepReport
    steps: int
    """Steps it tells of; none if it only says that orders were applied."""
    deliveries: Deliveries
    received: float
    """When it came, in seconds of the monotonic clock."""
    apply_s: float
    """Seconds the scheduler took to record it."""
    deliver_s: float
    """Seconds it took to make text of the tokens and to hand it to the clients."""
    alive: Container[RequestId]
    """Requests that go on after it."""


class StepObserver(Protocol):
    """Called on the event loop, when a session begins or ends, once a set of orders or a report; must neither block nor
    raise."""

    def on_session(self, replica: int) -> None:
        """A replica joined."""
        ...

    def on_loss(self, replica: int) -> None:
        """Its session ended, and what it held is gone."""
        ...

    def on_orders(self, orders: SchedulerOutput, seconds: float) -> None:
        """`orders` took so long to decide on, and are on their way."""
        ...

    def on_report(self, handled: Handled) -> None:
        """A report was dealt with."""
        ...
