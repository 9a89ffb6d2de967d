"""Many requests that come at once do not hold up the event loop, and thereby running streams."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from http_stack import Stack, request_bytes, serve, until

from text_generation_router.web.turns import AT_ONCE, Turns

BURST = 300
TEXT = {"inputs": "word " * 80, "parameters": {"max_new_tokens": 1}}


@asynccontextmanager
async def in_slices() -> AsyncIterator[None]:
    """Fail if one iteration of the event loop takes a third of the processor time of all of them."""
    spent = []

    async def iterate() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            spent.append(time.thread_time() - began)

    async with asyncio.TaskGroup() as tasks:
        iterating = tasks.create_task(iterate())
        await asyncio.sleep(0)
        yield
        await asyncio.sleep(0)
        iterating.cancel()
    assert max(spent) < sum(spent) / 3, f"one iteration took {max(spent):.3f} of {sum(spent):.3f} s"


@asynccontextmanager
async def burst(stack: Stack, sent: bytes) -> AsyncIterator[list[socket.socket]]:
    """Send the same bytes on BURST connections at once."""
    with ExitStack() as connections:
        clients = [connections.enter_context(socket.create_connection(("127.0.0.1", stack.port))) for _ in range(BURST)]
        await until(lambda: stack.metrics.connections.open >= BURST)
        for client in clients:
            client.sendall(sent)
        yield clients


async def test_requests_that_come_at_once_begin_in_slices(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, max_concurrent_requests=BURST) as stack:
        await stack.generate("warm", max_new_tokens=1)
        async with burst(stack, request_bytes("/generate_stream", TEXT)) as clients, in_slices():
            for client in clients:
                client.settimeout(0)
                answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 16), 20)
                assert answer.startswith(b"HTTP/1.1 200 ")
        await stack.assert_empty()


async def test_work_waits_in_order_for_its_turn_and_may_be_cancelled() -> None:
    turns, done = Turns(), []

    async def work(number: int) -> None:
        await turns.take()
        done.append(number)

    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(work(number)) for number in range(3 * AT_ONCE)]
        await asyncio.sleep(0)
        assert done == list(range(AT_ONCE))
        waiting[AT_ONCE].cancel()
    assert done == [number for number in range(3 * AT_ONCE) if number != AT_ONCE]
