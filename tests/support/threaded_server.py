"""A server in a thread of its own, for tests whose client is synchronous."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from http_stack import Stack, serve


@dataclass
class Server:
    """A server in its own thread and one client connection to it."""

    stack: Stack
    loop: asyncio.AbstractEventLoop
    connection: http.client.HTTPConnection

    def post(self, route: str, body: bytes, content_type: str = "application/json") -> tuple[int, str, bytes, float]:
        """Status, content type, body, and seconds without the time spent waiting for a core."""
        started, waited = time.perf_counter(), waited_for_a_core()
        self.connection.request("POST", route, body, {"content-type": content_type})
        response = self.connection.getresponse()
        reply = response.read()
        took = time.perf_counter() - started - (waited_for_a_core() - waited)
        return response.status, response.headers.get("content-type", ""), reply, took


def waited_for_a_core() -> float:
    """Seconds that runnable threads of this process waited for a core (Linux; elsewhere 0)."""
    delays = (path.read_text().split()[1] for path in Path("/proc/self/task").glob("*/schedstat"))
    return sum(map(int, delays)) / 1e9


@contextmanager
def serve_in_thread(model: Path) -> Iterator[Server]:
    """Serve the tokenizer of `model` with the echo engine."""
    ready: Future[tuple[Stack, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def until_stopped() -> None:
        async with serve(model) as stack:
            stop = asyncio.Event()
            ready.set_result((stack, asyncio.get_running_loop(), stop))
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(until_stopped())
        except Exception as error:  # noqa: BLE001 - raised below
            ready.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    stack, loop, stop = ready.result(timeout=30)
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=30)
    try:
        yield Server(stack, loop, connection)
    finally:
        connection.close()
        loop.call_soon_threadsafe(stop.set)
        thread.join()
