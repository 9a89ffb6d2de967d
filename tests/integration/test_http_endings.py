"""Every request ends once and frees everything: refused, failed, cancelled by its client, or served."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from checked_echo import failing_at
from every_dialect import stream_data
from http_stack import Stack, request_bytes, serve, until
from structlog.testing import capture_logs

MANY = 1500


async def connect(stack: Stack, body: dict[str, Any], route: str = "/generate_stream") -> asyncio.StreamWriter:
    """Send a request on a new connection, which the caller closes."""
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(request_bytes(route, body))
    return writer


def asking_for(tokens: int, **parameters: object) -> dict[str, Any]:
    return {"inputs": "one two three four", "parameters": {"max_new_tokens": tokens, **parameters}}


def failures(stack: Stack, reason: str) -> int:
    return stack.counted(f'tgi_request_failure{{err="{reason}"}}')


# ------------------------------------------------------------------------------------------------------------- overload


async def test_each_sequence_of_best_of_takes_a_permit_after_the_rules_of_the_route(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, max_concurrent_requests=2) as stack:

        async def status_of(**parameters: object) -> int:
            body = {"inputs": "Hello", "parameters": {"max_new_tokens": 1, "do_sample": True, **parameters}}
            return (await stack.ask("/generate", body)).status

        assert await status_of(best_of=2) == 200
        assert await status_of(best_of=3) == 422, "the limit is 2: a retry would not help"
        async with stack.permits.take(1):
            assert await status_of(best_of=2) == 429
        async with stack.permits.take(2):
            assert (await status_of(best_of=9), await status_of(temperature=-1.0)) == (422, 429)
        await stack.assert_empty()


async def test_a_draining_server_refuses_new_requests_and_finishes_running_ones(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, echo_step_ms=2) as stack:
        async with stack.client.post("/generate_stream", json=asking_for(20)) as running:
            stack.cluster.draining = True
            refused = await stack.ask("/generate", asking_for(1))
            assert (refused.status, refused.body["error_type"]) == (503, "overloaded")
            assert (await running.read()).count(b"data: {") == 20
        stack.cluster.draining = False
        await stack.assert_empty()


# ---------------------------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
async def test_leaving_the_queue_frees_everything(demo_model: Path, route: str) -> None:
    async with serve(demo_model, chats=False, max_batch_size=1, echo_step_ms=5) as stack:
        first = await connect(stack, asking_for(MANY))
        second = await connect(stack, asking_for(MANY), route)
        await until(lambda: stack.scheduler.stats().waiting == 1)
        second.close()
        await until(lambda: stack.scheduler.stats().waiting == 0)
        assert stack.scheduler.stats().running == 1
        first.close()
        await stack.assert_empty()
        assert failures(stack, "dropped") == 2


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
async def test_leaving_during_prefill_frees_everything(demo_model: Path, route: str) -> None:
    async with serve(demo_model, chats=False, echo_prefill_us=1000) as stack:
        writer = await connect(stack, {"inputs": " the" * 300, "parameters": {"max_new_tokens": 5}}, route)
        await until(lambda: stack.engine.running == 1)
        writer.close()
        await stack.assert_empty()
        assert failures(stack, "dropped") == 1


@pytest.mark.parametrize(
    ("route", "best_of"),
    [("/generate", 1), ("/generate_stream", 1), ("/generate", 4)],
    ids=["whole", "stream", "best of"],
)
async def test_leaving_during_decode_frees_everything(demo_model: Path, route: str, best_of: int) -> None:
    async with serve(demo_model, chats=False, echo_step_ms=2) as stack:
        with capture_logs() as records:
            writer = await connect(stack, asking_for(MANY, best_of=best_of, do_sample=True), route)
            await until(lambda: stack.scheduler.stats().running == best_of and stack.scheduler.stats().used_tokens > 12)
            writer.close()
            await stack.assert_empty()
        assert failures(stack, "dropped") == 1
        assert [record["status"] for record in records if record["event"] == "request finished"] == [499, 200]
        assert all(record["log_level"] != "error" for record in records)
        assert "one two three four" not in str(records)


async def generated_unread(stack: Stack, version: str = "1.1") -> socket.socket:
    """Request a long stream and read nothing of it; return its connection when all is generated and not all is written."""
    connection = stack.small_window()
    connection.sendall(request_bytes("/generate_stream", asking_for(MANY, top_n_tokens=5), version=version))
    await until(lambda: stack.permits.in_use == 1 and stack.scheduler.stats().used_tokens > 0)
    await until(lambda: stack.permits.in_use == 0)  # the permit is that of the generation
    assert stack.metrics.connections.open == 1
    return connection


async def test_leaving_an_unread_stream_frees_everything(demo_model: Path) -> None:
    async with serve(demo_model, chats=False) as stack:
        (await generated_unread(stack)).close()
        await until(lambda: stack.metrics.connections.open == 0)
        await stack.assert_empty()


async def test_a_slow_reader_gets_every_event_in_order(demo_model: Path) -> None:
    async with serve(demo_model, chats=False) as stack:
        connection = await generated_unread(stack, version="1.0")
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection)
        _, body = (await reader.read()).split(b"\r\n\r\n", 1)
        events = stream_data(body)
        assert [event["index"] for event in events] == list(range(1, MANY + 1))
        assert events[-1]["generated_text"]
        writer.close()
        await stack.assert_empty()


async def test_a_preempted_request_counts_its_queue_time_and_cached_tokens_once(demo_model: Path) -> None:
    body = {"inputs": "one two three four five six", "parameters": {"max_new_tokens": 150}}
    async with serve(demo_model, chats=False, pool_tokens=256, echo_step_ms=1) as stack:

        async def one() -> float:
            status, _, headers = await stack.ask("/generate", body)
            assert status == 200
            assert headers["x-cached-tokens"] == "0", "found after a preemption: these do not count"
            return int(headers["x-queue-time"]) / 1e3

        async with asyncio.TaskGroup() as tasks:
            requests = [tasks.create_task(one()) for _ in range(2)]
        assert stack.scheduler.stats().preemptions > 0
        # Both were let in at once; the one that was preempted has waited since, but not in the queue it came through.
        assert max(request.result() for request in requests) < 0.1


# -------------------------------------------------------------------------------------------------------------- failures


FIRST, SECOND = 6310, 3116
"""The tokens of "Test request" in the order in which the echo engine returns them."""


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/"])
async def test_an_error_before_the_first_token_has_a_status(demo_model: Path, route: str) -> None:
    async with serve(demo_model, chats=False, build=failing_at(FIRST)) as stack:
        body = {"inputs": "Test request", "parameters": {"max_new_tokens": 4}, "stream": True}
        status, error, _ = await stack.ask(route, body)
        assert (status, list(error), error["error_type"]) == (424, ["error", "error_type"], "generation")
        assert error["error"].startswith("Request failed during generation: ")
        assert failures(stack, "generation") == 1
        await stack.assert_empty()


async def test_an_error_after_the_first_token_is_the_last_event(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, build=failing_at(SECOND), echo_step_ms=5) as stack:
        body = {"inputs": "Test request", "parameters": {"max_new_tokens": 4}}
        status, text, _ = await stack.ask("/generate_stream", body)
        events = stream_data(text.encode())
        assert (status, len(events)) == (200, text.count("\n\n"))
        assert [next(iter(event)) for event in events] == ["index", "error"]
        assert events[1]["error_type"] == "generation"
        assert failures(stack, "generation") == 1
        await stack.assert_empty()


async def test_a_whole_reply_that_fails_midway_is_an_error(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, build=failing_at(SECOND)) as stack:
        for best_of in (1, 3):
            parameters = {"max_new_tokens": 4, "best_of": best_of, "do_sample": True}
            body = {"inputs": "Test request", "parameters": parameters}
            assert (await stack.ask("/generate", body)).status == 424
        await stack.assert_empty()


async def test_a_stream_continues_after_its_shard_returns(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, echo_step_ms=2) as stack:
        undisturbed = await stack.generate("one two three", max_new_tokens=200)
        body = {"inputs": "one two three", "parameters": {"max_new_tokens": 200}}
        async with stack.client.post("/generate_stream", json=body) as streamed:
            first = await streamed.content.readuntil(b"\n\n")
            stack.stop_shard()
            events = stream_data(first + await streamed.content.read())
        assert [event["index"] for event in events] == list(range(1, 201))
        assert events[-1]["generated_text"] == undisturbed["generated_text"]
        assert stack.scheduler.stats().moves == 1
        await stack.assert_empty()


async def test_a_stream_that_loses_its_shard_too_often_ends_with_an_error(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, policy={"max_request_moves": 0}, echo_step_ms=2) as stack:
        async with stack.client.post("/generate_stream", json=asking_for(MANY)) as streamed:
            first = await streamed.content.readuntil(b"\n\n")
            stack.stop_shard()
            written = first + await streamed.content.read()
        assert (stream_data(written)[-1]["error_type"], written[-2:]) == ("generation", b"\n\n")
        assert failures(stack, "generation") == 1
        await stack.assert_empty()


# --------------------------------------------------------------------------------------------------- silence, old clients


@pytest.mark.parametrize(
    ("fail_token", "part"),
    [(-1, {"generated_text": "Test"}), (FIRST, {"error_type": "generation"})],
    ids=["text", "error"],
)
async def test_a_silent_stream_gets_comments_before_its_first_event(
    demo_model: Path, fail_token: int, part: dict[str, str]
) -> None:
    settings = {"keep_alive_s": 0.02}
    async with serve(
        demo_model, chats=False, settings=settings, echo_prefill_us=100_000, build=failing_at(fail_token)
    ) as stack:
        body = {"inputs": "Test request", "parameters": {"max_new_tokens": 1}}
        status, text, _ = await stack.ask("/generate_stream", body)
        assert (status, text[:6]) == (200, ":\n\n:\n\n")
        assert part.items() <= stream_data(text.encode())[-1].items()


async def test_http_1_0_gets_an_unchunked_body_and_the_end_of_its_connection(demo_model: Path) -> None:
    async with serve(demo_model, chats=False) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        request = request_bytes("/generate_stream", asking_for(2), version="1.0")
        writer.write(request.replace(b"host: a\r\n", b"host: a\r\nconnection: keep-alive\r\n"))
        head, body = (await reader.read()).split(b"\r\n\r\n", 1)
        assert b"chunked" not in head.lower()
        assert [event[:13] for event in body.split(b"\n\n")] == [b'data: {"index', b'data: {"index', b""]
        writer.close()


async def test_a_connection_is_reused(demo_model: Path) -> None:
    async with serve(demo_model, chats=False) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        for _ in range(3):
            writer.write(request_bytes("/generate_stream", asking_for(3)))
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            body = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert body.count(b"data: {") == 3
        writer.close()
        await stack.assert_empty()
