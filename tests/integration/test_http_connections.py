"""Limits of connections: deadlines, bytes that a client does not read, the number of connections, the state of draining."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from http_stack import Stack, request_bytes, serve, until

from text_generation_router.web.connections import ConnectionLimits

HEADERS = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
LATE = 5.0
"""Seconds after which a connection that should be closed fails the test."""


async def answer_to(stack: Stack, sent: bytes) -> bytes:
    """Send bytes on a new connection; return what the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(sent)
    try:
        async with asyncio.timeout(LATE):
            return await reader.read()
    finally:
        writer.close()


def closed(stack: Stack, reason: str) -> int:
    return stack.counted(f'text_generation_connections_closed_total{{reason="{reason}"}}')


# ------------------------------------------------------------------------------------------------------------- deadlines


async def test_unfinished_requests_and_idle_connections_end(demo_model: Path) -> None:
    limits = ConnectionLimits(headers_s=0.3, keep_alive_s=1.5)
    async with serve(demo_model, chats=False, connections=limits, settings={"body_s": 0.3}) as stack:
        whole = request_bytes("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}})
        async with asyncio.TaskGroup() as tasks:
            sent = (b"", HEADERS, whole[:-1], whole, whole + HEADERS)
            answers = [tasks.create_task(answer_to(stack, data)) for data in sent]
        silent, half_headers, body, idle, next_headers = (answer.result() for answer in answers)
        assert silent == b""
        assert half_headers.startswith(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n")
        assert body.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in body.lower()
        assert body.endswith(b"it arrives too slowly")
        assert [answer[:15] for answer in (idle, next_headers)] == [b"HTTP/1.1 200 OK"] * 2
        assert closed(stack, "headers") == 2
        await stack.assert_empty()


async def test_headers_have_a_deadline_from_their_first_byte_and_bodies_a_minimum_rate(demo_model: Path) -> None:
    settings = {"body_s": 1.0}
    async with serve(demo_model, chats=False, connections=ConnectionLimits(headers_s=1.0), settings=settings) as stack:

        async def sent_in_parts(parts: list[bytes]) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
            line = tasks.create_task(reader.readline())
            for part in parts:
                writer.write(part)
                if (await asyncio.wait([line], timeout=0.1))[0]:
                    break
            await asyncio.wait([line], timeout=LATE)
            writer.close()
            return line.result()

        body = request_bytes("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}, "pad": " " * 20_000})
        steady = [body[at : at + 1500] for at in range(0, len(body), 1500)]  # 15 kB/s, for longer than that
        slow = [body[:19_000], *([b" "] * 20), body[19_000:]]
        lines = [HEADERS, *([b"x-a: 1\r\n"] * 20)]
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(sent_in_parts(parts)) for parts in (steady, slow, lines)]
        assert [answer.result() for answer in answers] == [
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 408 Request Timeout\r\n",
            b"HTTP/1.1 408 Request Timeout\r\n",
        ]


# ---------------------------------------------------------------------------------------------------------- unread bytes


async def test_a_stream_ends_when_its_client_is_too_far_behind(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, settings={"max_unread_bytes": 20_000}) as stack:
        body = {"inputs": "one two three four", "parameters": {"max_new_tokens": 2000, "top_n_tokens": 5}}
        with stack.small_window() as client:
            client.sendall(request_bytes("/generate_stream", body))
            await until(lambda: closed(stack, "unread") == 1)
            await until(lambda: stack.scheduler.stats().running == stack.metrics.connections.open == 0)
        await stack.assert_empty()


async def test_a_client_that_reads_gets_events_of_any_size(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, settings={"max_unread_bytes": 20_000}) as stack:
        body = {"prompt": "a few words " * 250, "n": 2, "max_tokens": 2, "echo": True, "logprobs": 5, "stream": True}
        *events, done, _ = (await stack.ask("/v1/completions", body)).body.split("\n\n")
        assert (len(events), done) == (4, "data: [DONE]")
        assert sum(len(event) > 20_000 for event in events) == 2
        await stack.assert_empty()


async def test_every_response_that_is_not_read_ends_and_a_slow_reader_gets_all_of_it(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, connections=ConnectionLimits(stall_s=0.7)) as stack:
        tokenize = request_bytes("/tokenize", {"inputs": "one two three four " * 10_000})
        stream = {"inputs": "one two three four", "parameters": {"max_new_tokens": 2000, "top_n_tokens": 5}}
        never = (
            tokenize,
            request_bytes("/generate_stream", stream),
            b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n" * 30,
        )
        with ExitStack() as clients:
            for request in never:
                clients.enter_context(stack.small_window()).sendall(request)
            slow = clients.enter_context(stack.small_window())
            slow.sendall(tokenize)
            slow.setblocking(False)
            received, loop = 0, asyncio.get_running_loop()
            while closed(stack, "stalled") < len(never):
                received += len(await loop.sock_recv(slow, 2000))
                await asyncio.sleep(0.05)
            while b"0\r\n\r\n" not in (rest := await loop.sock_recv(slow, 1 << 20)):
                received += len(rest)
            assert received > 1_000_000
        await until(lambda: stack.metrics.connections.open == 0)


# ------------------------------------------------------------------------------------------------ too many, and draining


async def test_beyond_the_limit_the_longest_idle_makes_room_and_then_only_probes_are_answered(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, connections=ConnectionLimits(limit=4), echo_step_ms=5) as stack:
        idle = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(4)]
        await until(lambda: stack.metrics.connections.open == 4)
        await asyncio.sleep(1.1)  # none of them is new any more
        endless = {"inputs": "one two three", "parameters": {"max_new_tokens": 1500}}
        streams = [await stack.client.post("/generate_stream", json=endless) for _ in range(4)]
        assert closed(stack, "replaced") == 4
        assert [await reader.read() for reader, _ in idle] == [b""] * 4

        status, _, headers = await stack.ask("/generate", endless)
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        crowd = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(100)]
        for path in ("/health", "/health/live", "/metrics", "/v2/health/ready"):
            probe = await stack.ask(path)
            assert (probe.status, probe.headers["connection"]) == (200, "close")
        for _, writer in (*idle, *crowd):
            writer.close()
        for stream in streams:
            stream.close()
        await until(lambda: stack.metrics.connections.open == 0)
        await stack.assert_empty()
