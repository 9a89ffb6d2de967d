"""Streamed events end with the error, and keep their order behind a client that reads late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web
from http_stack import answering, until

from text_generation_router.api.http.dialects import tgi_error_event
from text_generation_router.errors import GenerationFailed
from text_generation_router.web.sse import EventStream

EVENTS = [b"data: %01000d\n\n" % number for number in range(20_000)]
"""More than the buffers of a connection hold."""


async def body_of(produce: Callable[[EventStream], Awaitable[None]]) -> bytes:
    """Return the body of a stream; its client begins to read when `produce` has ended."""
    ended = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        events = EventStream(request, {}, 15.0, 100_000_000, tgi_error_event)

        async def run() -> None:
            try:
                await produce(events)
            finally:
                ended.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run())
            return await events.run()

    async with answering(stream) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")  # no chunks: the body ends with the connection
        await ended.wait()
        answer = await reader.read()
        writer.close()
    return answer.partition(b"\r\n\r\n")[2]


async def test_events_for_a_late_client_are_held_in_order() -> None:
    held: list[int] = []

    async def produce(events: EventStream) -> None:
        for number, event in enumerate(EVENTS):
            events.send(event)
            if number == 0:
                await until(lambda: not events.held)
            elif number % 100 == 0:
                await asyncio.sleep(0)
        held.append(len(events.held))
        events.close()

    assert await body_of(produce) == b"".join(EVENTS)
    assert held[0] > 1_000_000, "a congested connection was written to"


async def test_nothing_follows_the_event_of_a_failure() -> None:
    async def produce(events: EventStream) -> None:
        events.send(b"data: 1\n\n")
        await until(lambda: not events.held)
        events.send(b"data: 2\n\n")
        events.fail(GenerationFailed("broken"))
        for _ in range(5):
            events.send(b"data: late\n\n")
            await asyncio.sleep(0)

    body = await body_of(produce)
    assert body.startswith(b"data: 1\n\ndata: 2\n\ndata:")
    assert b"broken" in body
    assert b"late" not in body
