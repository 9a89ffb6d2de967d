"""A request past its deadline ends with 408 or an error event in every dialect, never with `length`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from every_dialect import GENERATE, MESSAGES, STREAMED, VERBATIM, WHOLE, Asking, name, stream_data
from http_stack import Stack, serve, until

MANY = 1500
TIMED_OUT = {"timeout", "timeout_error"}


def counted(stack: Stack, line: str) -> int:
    lines = stack.metrics.exposition().decode().splitlines()
    return next(int(float(one.rsplit(" ", 1)[1])) for one in lines if one.startswith(line + " "))


def assert_timed_out_once(stack: Stack) -> None:
    assert counted(stack, 'tgi_request_failure{err="timeout"}') == 1
    assert counted(stack, 'text_generation_requests_finished_total{reason="expired"}') == 1
    assert counted(stack, 'text_generation_requests_finished_total{reason="length"}') == 0


@pytest.mark.parametrize("asking", WHOLE, ids=name)
async def test_a_response_that_is_not_complete_in_time_is_408(demo_model: Path, asking: Asking) -> None:
    async with serve(demo_model, chat_template=VERBATIM, echo_step_ms=5) as stack:
        body = asking.body("one two three four", MANY) | {"timeout": 0.05}
        async with stack.client.post(asking.path, json=body) as response:
            assert response.status == 408, await response.text()
            assert "retry-after" not in response.headers
            error = await response.json()
        assert asking.error_word(error) in TIMED_OUT
        assert "Request timed out: " in str(error)
        assert_timed_out_once(stack)
        await stack.assert_empty()


@pytest.mark.parametrize("asking", STREAMED, ids=name)
async def test_a_stream_past_its_deadline_ends_with_an_error(demo_model: Path, asking: Asking) -> None:
    async with serve(demo_model, chat_template=VERBATIM, echo_step_ms=5) as stack:
        body = asking.streamed("one two three four", MANY)
        headers = {"x-request-timeout-ms": "150"}
        async with stack.client.post(asking.path, json=body, headers=headers) as response:
            assert response.status == 200
            written = await response.read()
        *before, last = stream_data(written)
        assert len(before) > 2
        assert "Request timed out: " in str(last)
        assert b'"length"' not in written
        assert b"max_tokens" not in written
        if asking.path == "/v1/responses":
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        else:
            assert asking.error_word(last) in TIMED_OUT
        assert written.endswith(b"data: [DONE]\n\n") == asking.path.endswith("completions")
        assert_timed_out_once(stack)
        await stack.assert_empty()


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-queue-timeout-ms": "60"}, {}),
        ({"grpc-timeout": "60m"}, {}),
        ({"x-request-timeout-ms": "60"}, {}),
        ({}, {"queue_timeout": 0.06}),
        ({}, {"timeout": 0.06}),
        ({}, {"parameters": {"queue_timeout": 0.06}}),
        ({"x-queue-timeout-ms": "60000"}, {"parameters": {"queue_timeout": 0.06}, "queue_timeout": 3.0}),
    ],
)
async def test_a_request_leaves_the_queue_at_its_queue_timeout(
    demo_model: Path, headers: dict[str, str], fields: dict[str, object]
) -> None:
    # Nothing is known of the server's pace before its first step, which takes longer than the request may wait.
    async with serve(demo_model, max_batch_size=1, echo_prefill_us=250_000) as stack, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stack.generate("one two", max_new_tokens=1))
        await until(lambda: stack.scheduler.stats().running == 1)
        body = {"inputs": "Hello", **fields}
        async with stack.client.post("/generate_stream", json=body, headers=headers) as response:
            assert (response.status, response.content_type) == (408, "application/json")
            assert (await response.json())["error_type"] == "timeout"
        assert not running.done()
        assert stack.scheduler.stats().waiting == 0
        await running
        assert counted(stack, 'tgi_request_failure{err="timeout"}') == 1


async def test_a_request_whose_estimated_wait_is_too_long_is_refused_at_once(demo_model: Path) -> None:
    async with serve(demo_model, max_batch_size=1, echo_step_ms=5) as stack:
        async with stack.client.post("/generate_stream", json=GENERATE.body("one two", MANY)) as running:
            for _ in range(20):
                await running.content.readuntil(b"\n\n")
            async with stack.client.post("/generate", json={"inputs": "Hello", "queue_timeout": 0.01}) as response:
                assert (response.status, (await response.json())["error_type"]) == (429, "overloaded")
                assert 1 <= int(response.headers["retry-after"]) <= 60
        await stack.assert_empty()


async def test_a_queue_timeout_does_not_end_a_running_request(demo_model: Path) -> None:
    async with serve(demo_model, echo_step_ms=5) as stack:
        reply = await stack.generate("one two three four", max_new_tokens=40, details=True, queue_timeout=0.1)
        assert reply["details"]["generated_tokens"] == 40


async def test_a_target_for_the_first_token_ends_nothing(demo_model: Path) -> None:
    async with serve(demo_model, echo_step_ms=5) as stack:
        for header in ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"):
            body = GENERATE.body("one two three four", 20)
            async with stack.client.post("/generate", json=body, headers={header: "1"}) as response:
                assert response.status == 200
                assert (await response.json())["details"]["generated_tokens"] == 20


async def test_the_operators_timeout_is_an_upper_bound(demo_model: Path) -> None:
    async with serve(demo_model, settings={"request_timeout": 0.1}, echo_step_ms=5) as stack:
        for more in ({}, {"timeout": 1000.0}):
            body = GENERATE.body("one two three four", MANY) | more
            async with stack.client.post("/generate", json=body, headers={"grpc-timeout": "1H"}) as response:
                assert response.status == 408
        await stack.generate("Hello", max_new_tokens=1)


async def test_several_prompts_share_one_deadline(demo_model: Path) -> None:
    async with serve(demo_model, echo_step_ms=5) as stack:
        instances = [
            {"inputs": "Hello", "parameters": {"max_new_tokens": 1}},
            {"inputs": "one two three four", "parameters": {"max_new_tokens": MANY}, "timeout": 0.1},
        ]
        async with stack.client.post("/vertex", json={"instances": instances}) as response:
            assert response.status == 408
        await stack.assert_empty()


# -------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("asking", [*WHOLE, *STREAMED[:1]], ids=name)
async def test_an_invalid_timeout_is_refused_in_the_routes_dialect(demo_model: Path, asking: Asking) -> None:
    async with serve(demo_model, chat_template=VERBATIM) as stack:
        cases: list[tuple[dict[str, str], dict[str, object], str]] = [
            ({}, {"timeout": 0}, "`timeout` must be > 0"),
            ({}, {"queue_timeout": -1}, "`queue_timeout` must be > 0"),
            ({"x-slo-ttft-ms": "soon"}, {}, "header `x-slo-ttft-ms` must be"),
            ({"x-smg-priority": "first"}, {}, "header `x-smg-priority` must be"),
            ({"x-llm-d-inference-fairness-id": "a" * 129}, {}, "header `x-llm-d-inference-fairness-id` must"),
        ]
        for headers, fields, words in cases:
            body = asking.body("Hello", 1) | fields
            async with stack.client.post(asking.path, json=body, headers=headers) as response:
                assert response.status == 422
                error = await response.json()
            assert f"Input validation error: {words}" in str(error)
            if asking.path == MESSAGES.path:
                assert asking.error_word(error) == "invalid_request_error"
        assert counted(stack, 'tgi_request_failure{err="validation"}') == len(cases)
        await stack.assert_empty()


async def test_interactive_requests_run_before_bulk(demo_model: Path) -> None:
    async with serve(demo_model, max_batch_size=1, echo_step_ms=2) as stack:
        order: list[str] = []

        async def one(word: str, headers: dict[str, str], fields: dict[str, object]) -> None:
            body = {"prompt": "Hello", "max_tokens": 2, **fields}
            async with stack.client.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
            order.append(word)

        async with stack.client.post("/generate_stream", json=GENERATE.body("one two", 100)) as running:
            await until(lambda: stack.scheduler.stats().running == 1)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(one("bulk", {}, {"service_tier": "flex"}))
                await until(lambda: stack.scheduler.stats().waiting == 1)
                tasks.create_task(one("default", {}, {"service_tier": "auto"}))
                await until(lambda: stack.scheduler.stats().waiting == 2)
                tasks.create_task(one("urgent", {}, {"priority": -1}))
                await until(lambda: stack.scheduler.stats().waiting == 3)
                tasks.create_task(one("most urgent", {"x-smg-priority": "system"}, {"priority": 5}))
                await until(lambda: stack.scheduler.stats().waiting == 4)
            await running.read()
        assert order == ["most urgent", "urgent", "default", "bulk"]
