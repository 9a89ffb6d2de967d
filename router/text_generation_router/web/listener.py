"""The HTTP server: its listeners, from the first connection to the last response.

The sockets accept here, not in asyncio: a connection is admitted before it exists, and none waits in the queue of a socket
when it closes.

    serving ──SIGTERM──► answered ──► leave: last requests ──► socket closes ──► last responses ──► close
             readiness 503; each new request gets 503 and `Connection: close`; no connection is refused before the end
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

from text_generation_router.metrics.connections import ConnectionMetrics
from text_generation_router.web.connections import Connection, ConnectionLimits, Connections, answer_whole

BACKLOG = 1024
"""Connections that wait to be accepted."""
ACCEPTED_AT_ONCE = 4
"""Connections accepted before other work runs."""
NO_DESCRIPTOR_PAUSE_S = 0.01
"""Seconds until connections are accepted again after no descriptor was free."""
UNSENT_IN_KERNEL = 1 << 14
"""Bytes that the system holds unsent for a connection. It would hold megabytes, and hide for minutes that a client reads."""
RECEIVED_AHEAD = 1 << 17
"""Bytes of a connection that the system receives ahead. The event loop reads all of them before it serves another one."""
LAST_REQUESTS_S = 1.0
"""Seconds for clients to send one more request, on connections that are open, before these are closed."""
LAST_EVENTS_S = 0.3
"""Seconds for the error events of aborted streams to reach their clients."""
POLL_S = 0.01
"""Seconds between two looks at the connections of a draining server."""


class Listener:
    """A listening socket and the connections that it accepted."""

    def __init__(self, host: str, port: int, connections: Connections, *, shared: bool) -> None:
        """Listen; if the port is `shared`, other processes listen on it too. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # As most servers do, `::` listens at the addresses of IPv4 too.
        both = host == "::" and socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, reuse_port=shared, dualstack_ipv6=both
        )
        self._socket.settimeout(0)
        # Accepted sockets inherit both.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_AHEAD)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_IN_KERNEL)
        self.port: int = self._socket.getsockname()[1]
        self.connections = connections
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(connections.watch())
        self._connecting: set[asyncio.Task[None]] = set()
        self._loop.add_reader(self._socket, self._accept)

    def stop_listening(self) -> None:
        """Accept the connections that wait, then close the socket."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            while self._accept_one():
                pass
            self._socket.close()

    async def connected(self) -> None:
        """Wait until every accepted connection can be read."""
        if self._connecting:
            await asyncio.wait(self._connecting)

    def close(self) -> None:
        """Stop listening, and watching the connections."""
        self.stop_listening()
        self._watching.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Accept a connection; False if none waits."""
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:  # the client left
            return True
        except OSError:  # no descriptor or no memory is left
            self.connections.make_room()
            self._loop.remove_reader(self._socket)
            self._loop.call_later(NO_DESCRIPTOR_PAUSE_S, self._accept_again)
            return False
        connection = self.connections.admit(accepted.fileno())
        if connection is None:
            accepted.close()
            return True
        task = self._loop.create_task(self._connect(accepted, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    def _accept_again(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    async def _connect(self, accepted: socket.socket, connection: Connection) -> None:
        accepted.settimeout(0)
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # the client left
            accepted.close()


class HttpServer:
    """An application behind one or two listeners."""

    def __init__(
        self, app: web.Application, limits: ConnectionLimits, metrics: ConnectionMetrics, *, shared: bool = False
    ) -> None:
        """`shared`: other HTTP workers listen on the same ports."""
        app.middlewares.insert(0, answer_whole)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=LAST_EVENTS_S)
        self._limits = limits
        self._metrics = metrics
        self._shared = shared
        self._listeners: list[Listener] = []
        """The main one first."""

    @property
    def port(self) -> int:
        """The port of the main listener."""
        return self._listeners[0].port

    async def listen(self, host: str, port: int, management_port: int = 0) -> None:
        """Listen on `port`, and on `management_port` for probes and metrics unless it is 0. Raises OSError."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        connections = Connections(server, self._limits, self._metrics)
        self._listeners.append(Listener(host, port, connections, shared=self._shared))
        if management_port:
            connections = Connections(server, self._limits, self._metrics, management=True)
            self._listeners.append(Listener(host, management_port, connections, shared=self._shared))

    async def answered(self) -> None:
        """Wait for the responses to the requests that are there now."""
        running = [connection for listener in self._listeners for connection in listener.connections if connection.busy]
        await _until(lambda: not any(connection.busy for connection in running))

    async def leave(self) -> None:
        """Stop listening when clients have learned that the server drains: each gets one more response.

        The management port is open until `close`.
        """
        listener = self._listeners[0]
        connections = listener.connections
        await _until(lambda: not len(connections), LAST_REQUESTS_S)
        listener.stop_listening()
        await listener.connected()
        await _until(lambda: all(each.idle for each in connections), LAST_REQUESTS_S)

    async def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        await self._runner.cleanup()


async def _until(holds: Callable[[], bool], timeout_s: float | None = None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not holds():  # noqa: ASYNC110 - no event: this runs once, at the end
                await asyncio.sleep(POLL_S)
