"""Traces of a whole server: router and two shards as processes, and a collector that speaks OTLP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from otlp_collector import CollectedSpan, Collector, collecting
from stack import running

pytestmark = pytest.mark.system

ROUTER, SHARD = "text-generation-inference.router", "text-generation-inference.server"
CLIENT = "00f067aa0ba902b7"
SERVER_KIND, ERROR = 2, 2
ENVIRON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_EXPORTER_OTLP_HEADERS": "x-scope=team"}


def headers(trace: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{CLIENT}-{flags}", "tracestate": "vendor=1"}


async def arrived(collector: Collector, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the collector runs in threads
            await asyncio.sleep(0.05)


async def post(
    session: aiohttp.ClientSession,
    url: str,
    headers: dict[str, str],
    body: object,
    begun: asyncio.Semaphore | None = None,
) -> int:
    """Send a request and read its reply; `begun` is released at its first byte. Return the status."""
    async with session.post(url, json=body, headers=headers) as response:
        await response.content.readany()
        if begun is not None:
            begun.release()
        await response.read()
        return response.status


async def post_bytes(url: str, headers: dict[str, str], body: bytes, agent: bytes) -> bytes:
    """Send a request for text with any bytes as its user agent; return the first line of the reply."""
    sent = headers | {"host": "a", "content-type": "application/json", "content-length": str(len(body))}
    lines = [f"{name}: {value}".encode() for name, value in sent.items()]
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(b"\r\n".join([b"POST /generate HTTP/1.1", b"user-agent: " + agent, *lines, b"", body]))
    try:
        return await reader.readline()
    finally:
        writer.close()


async def test_a_request_is_traced_from_its_client_to_the_shards_also_through_a_move(
    echo_model: Path, session: aiohttp.ClientSession
) -> None:
    chat, lost, refused, unsampled, foreign, unknown = (f"{number:032x}" for number in range(1, 7))
    with collecting() as collector:
        flags = ("--num-replicas=2", "--echo-step-ms=10", "--max-batch-size=1", "--otlp-endpoint", collector.endpoint)
        with running(echo_model, *flags, environ=ENVIRON) as stack:
            messages = [{"role": "user", "content": "one two three"}]
            body = {"model": "tgi", "messages": messages, "max_tokens": 5, "stream": True}
            body |= {"temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["STOP"]}
            assert await post(session, f"{stack.url}/v1/chat/completions", headers(chat), body) == 200
            finished = await asyncio.to_thread(stack.wait_for, "request finished", "router")
            assert finished["trace_id"] == chat
            await arrived(collector, lambda: "shard" in collector.of(chat))  # before that shard is killed
            body = {"inputs": "a", "parameters": {"max_new_tokens": 0}}
            assert await post(session, f"{stack.url}/generate", headers(refused), body) == 422
            body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
            assert await post(session, f"{stack.url}/generate", headers(unsampled, "00"), body) == 200
            assert await post(session, f"{stack.url}/no/such", headers(unknown), {}) == 404
            async with session.get(f"{stack.url}/info", headers=headers(unsampled)) as response:
                assert response.status == 200
            assert b" 200 " in await post_bytes(
                stack.url, headers(foreign), b'{"inputs": "a", "parameters": {"max_new_tokens": 1}}', b"a\xff"
            )
            await arrived(collector, lambda: "POST /generate" in collector.of(foreign))
            # One sequence a replica: one of the two requests loses its shard.
            body = {"inputs": "a", "parameters": {"max_new_tokens": 100}}
            begun = asyncio.Semaphore(0)
            async with asyncio.TaskGroup() as tasks:
                send = partial(post, session, f"{stack.url}/generate_stream", headers(lost), body, begun)
                both = [tasks.create_task(send()) for _ in range(2)]
                for _ in both:
                    await begun.acquire()
                stack.kill("shard")
            assert [task.result() for task in both] == [200, 200]
            await arrived(collector, lambda: len(collector.of(lost).get("POST /generate_stream", ())) == 2)
            await arrived(collector, lambda: len(collector.of(lost).get("shard", ())) >= 2)
        _check_chat(collector.of(chat), str(echo_model))
        _check_move(collector.of(lost))
        (request,) = collector.of(refused)["POST /generate"]
        assert request.attributes["http.response.status_code"] == 422
        assert request.attributes["error.type"] == "validation"
        assert "gen_ai.response.model" not in request.attributes
        assert collector.of(unknown).keys() == {"POST"}
        assert request.status != ERROR, "the client's error is not the server's"
        assert collector.of(unsampled) == {}
        assert collector.headers["x-scope"] == "team"


def _check_chat(spans: dict[str, list[CollectedSpan]], model: str) -> None:
    names = {"POST /v1/chat/completions", "tokenize", "queue", "prefill", "decode", "shard", "prefill chunk"}
    assert spans.keys() == names
    (request,), (shard,), (chunk,) = spans["POST /v1/chat/completions"], spans["shard"], spans["prefill chunk"]
    assert (request.parent, request.state, request.kind, request.service) == (CLIENT, "vendor=1", SERVER_KIND, ROUTER)
    assert (shard.parent, shard.state, shard.kind, shard.service) == (request.span_id, "vendor=1", SERVER_KIND, SHARD)
    assert chunk.parent == shard.span_id
    (computed,) = (span for span in spans["decode"] if span.service == ROUTER)
    (on_shard,) = (span for span in spans["decode"] if span.service == SHARD)
    assert (computed.parent, on_shard.parent) == (request.span_id, shard.span_id)
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["STOP"],
        "gen_ai.request.model": "tgi",
        "gen_ai.response.model": model,
        "server.address": "127.0.0.1",
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert {name: request.attributes.get(name) for name in expected} == expected
    assert isinstance(request.attributes["server.port"], int)
    assert shard.attributes["text_generation.generated_tokens"] == 5
    prompt = request.attributes["gen_ai.usage.input_tokens"]
    assert (
        prompt == chunk.attributes["text_generation.prompt_tokens"] == shard.attributes["text_generation.prompt_tokens"]
    )
    # The parts follow each other, and the first token ends the prefill.
    (tokenize,), (queue,), (prefill,) = spans["tokenize"], spans["queue"], spans["prefill"]
    times = [
        request.start,
        tokenize.start,
        tokenize.end,
        queue.start,
        queue.end,
        prefill.end,
        computed.end,
        request.end,
    ]
    assert times == sorted(times)
    assert computed.start == prefill.end
    assert prefill.end - request.start == pytest.approx(
        request.attributes["gen_ai.server.time_to_first_token"], abs=1e-3
    )
    assert computed.end - computed.start > 3 * 0.01, "four steps of 10 ms after the first token"


def _check_move(spans: dict[str, list[CollectedSpan]]) -> None:
    (move,) = spans["move"]
    assert move.attributes["text_generation.replica.lost"] == 0
    (parent,) = (request for request in spans["POST /generate_stream"] if request.span_id == move.parent)
    assert parent.start < move.start <= move.end < parent.end
    assert parent.attributes["gen_ai.usage.output_tokens"] == 100
    # The killed shard sent nothing; the next one continued with the tokens generated before.
    (resumed,) = (shard for shard in spans["shard"] if shard.attributes["text_generation.resumed_tokens"])
    assert 0 < resumed.attributes["text_generation.resumed_tokens"] < 100
    assert resumed.attributes["text_generation.generated_tokens"] == 100
    assert resumed.parent == parent.span_id
