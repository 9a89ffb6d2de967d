"""Metrics of HTTP: connections that are open, connections that a limit of the server closed, and all requests."""

from enum import Enum

from text_generation_router.metrics.instruments import Counter, GrowingCounter, Reading, Registry


class CloseReason(Enum):
    """The limit that closed a connection: the values of `reason` in `text_generation_connections_closed_total`."""

    HEADERS = "headers"
    """The headers of a request were not complete in time, or a new connection sent nothing."""
    STALLED = "stalled"
    """The client did not read its response."""
    UNREAD = "unread"
    """The client fell too many bytes behind its response."""
    REPLACED = "replaced"
    """All connections were taken, and this one waited for a request longer than the others."""
    REFUSED = "refused"
    """All connections were taken and had requests."""


NO_ROUTE = "unknown"
"""Value of `route` for requests without one: unknown paths and methods, and HTTP that cannot be parsed."""


class ConnectionMetrics:
    """Counts of connections and of their requests, never updated per token."""

    def __init__(self, registry: Registry) -> None:
        self.open = 0
        """Connections of this process."""
        self._all = registry.add(Reading, "text_generation_connections", "Open HTTP connections", lambda: self.open)
        self._closed = registry.add(
            Counter,
            "text_generation_connections_closed_total",
            "HTTP connections that a limit of the server closed, by limit",
            "reason",
            tuple(reason.value for reason in CloseReason),
        )
        self.requests = registry.add(
            GrowingCounter,
            "text_generation_http_requests_total",
            "HTTP requests by route and by the status of their responses; 499: the client left before",
            "route",
            "status",
        )

    @property
    def everywhere(self) -> int:
        """The connections of all HTTP workers."""
        return int(self._all.value)

    def closed(self, reason: CloseReason) -> None:
        self._closed.add(reason.value)

    def answered(self, route: str, status: int) -> None:
        """Count a request that ended; `route` is a path of the table of routes, or "" without one."""
        self.requests.add(f"{route or NO_ROUTE} {status}")
