"""The gate before all routes: which requests are answered on the management port, beyond the limit, while draining.

Probes and /metrics always are.
"""

from collections.abc import Collection

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from text_generation_router.cluster_interface import ClusterInterface
from text_generation_router.errors import Draining, TooManyConnections, UnknownRoute
from text_generation_router.web.connections import connection_of


class Gate:
    """Refuses requests by the state of the server and of their connection."""

    def __init__(self, always: Collection[web.AbstractRoute], cluster: ClusterInterface) -> None:
        """`always`: the routes that are answered in every state."""
        self._always = frozenset(always)
        self._cluster = cluster

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse. It comes before the check of keys."""
        if request.match_info.route not in self._always:
            connection = connection_of(request)
            if connection.management:
                raise UnknownRoute
            if connection.probes_only:
                raise TooManyConnections
            if self._cluster.draining:
                raise Draining
        return await handler(request)

    async def close_connection(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler for `on_response_prepare`: while it stops, and beyond the limit, a response is the last one."""
        if self._cluster.stopping or connection_of(request).probes_only:
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()
