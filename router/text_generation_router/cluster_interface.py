"""ClusterInterface: the replicas behind their scheduler, as the HTTP side of the router sees them."""

from collections.abc import Collection, Iterator
from typing import Protocol

from text_generation_router.request import Request, RequestId, TokenListener
from text_generation_router.shards.cluster import ClusterInfo


class ClusterInterface(Protocol):
    """A `Cluster` in this process, or a `RemoteCluster`: the one in the scheduler process."""

    stopping: bool
    """Set by the router when it is to stop: it is not ready, but still accepts requests until it drains."""
    draining: bool
    """Set by the router when it accepts no new requests; those accepted before still run."""
    ids: Iterator[RequestId]
    """Numbers for new requests."""

    def submit(self, request: Request, listener: TokenListener) -> None:
        """Queue `request`; `listener` gets its tokens until its end or `cancel`.

        A request that cannot be queued raises a ServingError, or its listener gets it as a failure.
        """

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request; no-op if it is unknown or ended."""

    def give_up(self, reason: str) -> None:
        """End all requests with an error, and accept no new ones."""

    async def info(self) -> ClusterInfo:
        """Return the state of the replicas. Raises Unhealthy."""

    async def set_adapter(self, name: str, path: str | None) -> None:
        """Load a LoRA adapter on all replicas, or on none; None: take no new requests with it, and drop it after its last one.

        Raises ServingError.
        """

    async def opened(self) -> None:
        """Wait until there may be something to serve with."""

    async def settled(self) -> None:
        """Wait until a replica serves, or other routers are found to drive all shards."""

    async def abandoned(self) -> None:
        """Wait until no shard is left, all having been told to stop."""

    @property
    def adapters(self) -> Collection[str]:
        """The LoRA adapters that requests may name."""

    @property
    def ready(self) -> bool:
        """True if a replica gets new requests now, and is to stay."""

    @property
    def live_requests(self) -> int:
        """The number of requests that have not ended."""

    @property
    def status(self) -> str:
        """The state of the replicas, for the service manager."""
