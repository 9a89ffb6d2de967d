"""The health of a shard, as its gRPC health service tells it.

""       SERVING: the engine is loaded and makes progress; the shard is not stopping
driven   SERVING: besides, a router drives the shard, with a Run session: what readiness of its pod means
"""

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as grpc_health

DRIVEN = "driven"
"""The name of the second service."""


class ShardHealth:
    """The state of both services. Used on the event loop only."""

    def __init__(self) -> None:
        self.servicer = grpc_health.HealthServicer()
        """The service, for both ports."""
        self._serving = False
        self._drivers = 0
        """Open Run streams: two for a moment, when one follows another."""

    async def set_serving(self, *, serving: bool) -> None:
        """Set the health of the shard, at the start and at changes."""
        self._serving = serving
        await self._publish()

    async def stop(self) -> None:
        """Serve no more: later changes have no effect."""
        await self.servicer.enter_graceful_shutdown()

    async def add_drivers(self, number: int) -> None:
        """Record that a router opened a session, or with -1 that one is over."""
        self._drivers += number
        await self._publish()

    async def _publish(self) -> None:
        for name, good in (("", self._serving), (DRIVEN, self._serving and self._drivers > 0)):
            status = health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING
            await self.servicer.set(name, status)
