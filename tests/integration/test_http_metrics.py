"""/metrics of a server under load: TGI's dashboard has data, and related counts agree."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checked_echo import failing_at
from http_stack import Stack, request_bytes, serve, until
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from yarl import URL

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(stack: Stack) -> Samples:
    """(name, labels) → value, as Prometheus reads it."""
    status, text, headers = await stack.ask("/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    # The parser expects counters to end in _total and would rename TGI's.
    families = text_string_to_metric_families(text.replace(" counter\n", " unknown\n"))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def total(samples: Samples, name: str) -> float:
    """A counter summed over its labels."""
    return sum(number for (other, _), number in samples.items() if other == name)


def body_of(tokens: int, **parameters: object) -> dict[str, Any]:
    return {"inputs": "one two three four", "parameters": {"max_new_tokens": tokens, **parameters}}


GAUGES = (
    *("trtllm_num_requests_waiting", "trtllm_num_requests_running", "trtllm_kv_cache_utilization"),
    *("trtllm_kv_cache_tokens_per_block", "trtllm_kv_cache_max_blocks"),
)
"""The gauges that the endpoint picker of llm-d reads from a pod of the type `trtllm-serve` (factories.go of its extractor)."""


async def test_work_that_waits_before_the_queue_is_visible(demo_model: Path) -> None:
    name, body = "text_generation_preparation_characters", {"inputs": "a " * 20_000}

    async with serve(demo_model) as stack:
        async with asyncio.TaskGroup() as tasks:
            posts = [tasks.create_task(stack.ask("/tokenize", body)) for _ in range(5)]
            while not value(await scrape(stack), name):
                assert not all(post.done() for post in posts), "nothing waited"
        assert {post.result().status for post in posts} == {200}
        assert value(await scrape(stack), name) == 0


async def test_an_endpoint_picker_reads_its_gauges_without_a_key(demo_model: Path) -> None:
    """The picker takes a family by its name, and needs a gauge without labels."""

    async def gauges(stack: Stack) -> dict[str, float]:
        families = {each.name: each for each in text_string_to_metric_families((await stack.ask("/metrics")).body)}
        read = {name: families[name] for name in GAUGES}
        assert [(each.type, len(each.samples), each.samples[0].labels) for each in read.values()] == [
            ("gauge", 1, {})
        ] * len(GAUGES)
        return {name: each.samples[0].value for name, each in read.items()}

    settings = {"api_key": ["sk-1"], "open_metrics": True}
    async with serve(demo_model, settings=settings, max_batch_size=2, pool_tokens=1600, echo_step_ms=2) as stack:
        stack.client.headers["authorization"] = "Bearer sk-wrong"
        assert list((await gauges(stack)).values()) == [0, 0, 0, 16, 100]
        assert (await stack.ask("/info")).status == 401
        stack.client.headers["authorization"] = "Bearer sk-1"
        async with asyncio.TaskGroup() as clients:
            running = [clients.create_task(stack.generate("one", max_new_tokens=200)) for _ in range(3)]
            await until(lambda: (stack.scheduler.stats().waiting, stack.scheduler.stats().running) == (1, 2))
            waiting, now, used, block_size, blocks = (await gauges(stack)).values()
            assert (waiting, now, block_size, blocks) == (1, 2, 16, 100)
            assert 0 < used < 1
            for client in running:
                client.cancel()


async def test_load_appears_in_every_batch_metric_and_every_histogram_of_tgis_dashboard(demo_model: Path) -> None:
    async with serve(demo_model, echo_step_ms=1, max_batch_size=4) as stack:

        async def client(first: int) -> None:
            for tokens in range(first, first + 5):
                await stack.generate("one two three four", max_new_tokens=5 * tokens)

        async with asyncio.TaskGroup() as clients:
            for number in range(8):
                clients.create_task(client(number + 1))
        loaded = await scrape(stack)
    observed = {
        (name, labels): number
        for (name, labels), number in loaded.items()
        if name.startswith("tgi_") and ("le", "+Inf") in labels
    }
    assert len(observed) > 15
    assert [series for series, number in observed.items() if not number] == []
    tokens = sum(5 * tokens for first in range(1, 9) for tokens in range(first, first + 5))
    assert value(loaded, "text_generation_generated_tokens_total") == tokens
    assert value(loaded, "text_generation_prompt_tokens_total") == 40 * 4
    assert value(loaded, "tgi_request_skipped_tokens_count") == tokens
    # Every token has a gap before it but each request's first.
    assert value(loaded, "text_generation_inter_token_seconds_count") == tokens - 40
    assert value(loaded, "tgi_batch_next_size_sum") == 40
    assert 0 < value(loaded, "tgi_batch_concat", reason="chunking") <= 40
    assert value(loaded, "tgi_batch_concat", reason="chunking") == value(
        loaded, "tgi_batch_concat_duration_count", method="decode"
    )
    for method in ("prefill", "decode"):
        steps = value(loaded, "tgi_batch_inference_count", method=method)
        assert steps == value(loaded, "tgi_batch_inference_success", method=method)
        assert steps == value(loaded, "tgi_batch_inference_duration_count", method=method)
        # A step takes at least the pace that was set, and its forward pass is a part of it.
        forward = value(loaded, "tgi_batch_forward_duration_sum", method=method)
        assert 0.001 * steps <= forward <= value(loaded, "tgi_batch_inference_duration_sum", method=method)


async def test_ttft_is_recorded_at_once_and_includes_the_queue(demo_model: Path) -> None:
    async with serve(demo_model, max_batch_size=1, echo_step_ms=20) as stack:
        async with stack.client.post("/generate_stream", json=body_of(1000)) as first:
            await first.content.readany()
            samples = await scrape(stack)
            assert value(samples, "text_generation_time_to_first_token_seconds_count") == 1
            assert total(samples, "text_generation_requests_finished_total") == 0
        await until(lambda: stack.scheduler.stats().running == 0)
        before = value(samples, "text_generation_time_to_first_token_seconds_sum")
        async with asyncio.TaskGroup() as tasks:  # the second waits for the first's ten steps
            tasks.create_task(stack.generate("Hello", max_new_tokens=10))
            tasks.create_task(stack.generate("Hello", max_new_tokens=1))
        samples = await scrape(stack)
        assert value(samples, "text_generation_time_to_first_token_seconds_count") == 3
        assert value(samples, "text_generation_time_to_first_token_seconds_sum") - before > 10 * 0.020


@pytest.mark.parametrize("best_of", [1, 2])
async def test_counts_agree_for_every_kind_of_end(demo_model: Path, best_of: int) -> None:
    """Requests served, refused, failed, or left in the queue, before and after the first token: each counts once."""
    chance = random.Random(3)

    async def one(stack: Stack, number: int) -> None:
        body = body_of(chance.randint(1, 60))
        kind = number % 6
        if kind == 0:
            body["parameters"]["temperature"] = -1.0
        elif kind == 1:
            body["parameters"] |= {"best_of": best_of, "do_sample": True}
        elif kind == 2:
            body["inputs"] = "one two fails"
        elif kind == 3:
            body["parameters"]["stop"] = [" three"]
        route = "/generate" if kind == 1 else chance.choice(("/generate", "/generate_stream"))
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(request_bytes(route, body).replace(b"host: a\r\n", b"host: a\r\nconnection: close\r\n"))
        cut = kind == 5 or number % 13 == 0
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await (reader.readexactly(chance.choice([1, 300, 1500])) if cut else reader.read())
        writer.close()

    async def client(stack: Stack, numbers: Iterator[int]) -> None:
        for number in numbers:
            await one(stack, number)

    fails = 12512  # " fails": the echo engine fails a sequence that comes to this token
    async with serve(
        demo_model,
        max_concurrent_requests=14,
        max_batch_size=4,
        pool_tokens=512,
        echo_step_ms=1,
        build=failing_at(fails),
    ) as stack:
        numbers = iter(range(240))
        async with asyncio.TaskGroup() as clients:
            for _ in range(16):
                clients.create_task(client(stack, numbers))
        await until(lambda: stack.permits.in_use == 0)
        await until(lambda: stack.scheduler.stats().running == 0)
        samples = await scrape(stack)
        await stack.assert_empty()

    started = value(samples, "tgi_request_count")
    finished = {
        dict(labels)["reason"]: count
        for (name, labels), count in samples.items()
        if name == "text_generation_requests_finished_total"
    }
    assert started == 240 == value(samples, "text_generation_requests_started_total")
    assert started == value(samples, "tgi_request_success") + total(samples, "tgi_request_failure")
    assert started == sum(finished.values())
    assert all(finished[reason] > 0 for reason in ("length", "stop_sequence", "refused", "error", "cancelled"))
    assert value(samples, "tgi_request_success") == finished["length"] + finished["stop_sequence"]
    assert finished["cancelled"] == value(samples, "text_generation_requests_cancelled_total")
    assert value(samples, "tgi_request_duration_count") == value(samples, "tgi_request_success")
    # Every token but a sequence's first has a gap before it, and both are counted apart from each other.
    firsts = value(samples, "text_generation_generated_tokens_total") - value(
        samples, "text_generation_inter_token_seconds_count"
    )
    first_tokens = value(samples, "text_generation_time_to_first_token_seconds_count")
    assert first_tokens == firsts if best_of == 1 else first_tokens < firsts
    assert value(samples, "tgi_request_success") <= first_tokens < started
    assert value(samples, "tgi_queue_size") == value(samples, "trtllm_kv_cache_utilization") == 0


async def test_the_choices_of_a_stream_fail_together_and_each_counts(demo_model: Path) -> None:
    async with serve(demo_model) as stack:
        [failing] = stack.tokenizer.encode_ids(" fail", add_special_tokens=False)
    async with serve(demo_model, build=failing_at(failing), echo_step_ms=2) as stack:
        body = {"prompt": ["go on and on", "go on fail"], "max_tokens": 500, "stream": True}
        assert (await stack.ask("/v1/completions", body)).body.endswith("data: [DONE]\n\n")
        series = 'tgi_request_failure{err="%s"}'
        assert (stack.counted(series % "generation"), stack.counted(series % "incomplete")) == (2, 0)
        assert stack.counted("tgi_request_count") == stack.counted("tgi_request_input_length_count") == 2


TOO_COLD = {"messages": [{"role": "user", "content": "Hi"}], "temperature": -1, "model": "tgi", "max_tokens": 1}
ENDINGS: list[tuple[str, str, str | dict[str, Any], int, str]] = [
    ("POST", "/v1/chat/completions", '{"messages":5}', 400, "`messages` must be an array"),
    ("POST", "/v1/chat/completions", "{", 400, "JSON: unexpected end"),
    ("POST", "/v1/chat/completions", TOO_COLD, 400, "`temperature`"),
    ("POST", "/v1/messages", TOO_COLD, 400, "`temperature`"),
    ("POST", "/generate", body_of(0), 422, "`max_new_tokens` must be strictly positive"),
    ("POST", "/generate", body_of(2), 200, ""),
    ("POST", "/no/such%0Apath", {}, 404, "is not served"),
    ("GET", "/v1/models/other", "", 404, "`other`"),
    ("DELETE", "/generate", "", 405, "is not allowed here"),
]
"""Method, path, body; the status and a part of the error."""


async def test_every_request_counts_by_route_and_status_and_a_refusal_has_its_reason(demo_model: Path) -> None:
    async with serve(demo_model, settings={"api_key": ["sk-1"]}) as stack:
        headers = {"content-type": "application/json", "x-llm-d-inference-fairness-id": "search"}
        stack.client.headers["authorization"] = "Bearer sk-1"
        with capture_logs() as logs:
            for method, path, body, status, _ in ENDINGS:
                data = body if isinstance(body, str) else json.dumps(body)
                async with stack.client.request(
                    method, URL(path, encoded=True), headers=headers, data=data
                ) as response:
                    assert response.status == status, await response.text()
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
            writer.write(b"GET / HTTP/1.1\r\nauthorization: sk-secret\x00\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()
        counted = {
            (dict(labels)["route"], int(dict(labels)["status"])): number
            for (name, labels), number in (await scrape(stack)).items()
            if name == "text_generation_http_requests_total"
        }
        shown = [(error.status, error.tenants[0], error.text) for error in reversed(list(stack.metrics.errors))]

    assert counted == {
        ("/v1/chat/completions", 400): 3,
        ("/v1/messages", 400): 1,
        ("/generate", 422): 1,
        ("/generate", 200): 1,
        ("/v1/models/{model}", 404): 1,
        ("unknown", 404): 1,
        ("unknown", 405): 1,
        ("unknown", 400): 1,
    }
    lines = [line for line in logs if line["event"] == "request finished"]
    for line, (_, path, body, status, reason) in zip(lines, ENDINGS, strict=True):
        assert list(line)[:3] == ["route", "status", "total_s"]
        assert (line["route"], line["status"]) == (path.replace("%0A", "\n"), status)
        assert (line["client"], line["tenant"]) == ("127.0.0.1", "search")
        assert reason in line.get("error", "")
        named = "tgi" if body == TOO_COLD else "echo" if "inputs" in body else None
        assert line.get("model") == named
    assert [line["error"] for line in logs if line["event"] == "request not readable"] == ["BadHttpMessage"]
    assert "secret" not in str(logs)
    refused = [(status, "search", reason) for _, _, _, status, reason in ENDINGS if reason]
    assert len(shown) == len(refused)
    assert [text for status, _, text in shown if status == 405] == ["/generate: DELETE is not allowed here, only POST"]
    for (status, tenant, text), (wanted, _, reason) in zip(shown, refused, strict=True):
        assert (status, tenant, reason in text) == (wanted, "search", True)
