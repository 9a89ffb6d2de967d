"""A request past its deadline ends with 408 or an error event in every dialect, never with `length`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from every_dialect import GENERATE, MESSAGES, STREAMED, VERBATIM, WHOLE, Asking, name, stream_data
from http_stack import Stack, serve, served, until

MANY = 1500
TIMED_OUT = {"timeout", "timeout_error"}


pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(chat_template=VERBATIM, echo_step_ms=5)


FAILURES = 'tgi_request_failure{err="%s"}'
EXPIRED = "text_generation_requests_expired_total"
FINISHED = 'text_generation_requests_finished_total{reason="%s"}'


def counts(stack: Stack) -> Counter[str]:
    """The value of each counter of ends."""
    names = ("tgi_request_failure{", FINISHED[:-4], EXPIRED)
    return Counter({name: int(value) for name, value in stack.exposed(*names).items()})


@asynccontextmanager
async def one_timeout(stack: Stack) -> AsyncIterator[None]:
    """Check that one request expires in the block, and that nothing is left of it."""
    before = counts(stack)
    yield
    assert counts(stack) - before == {FAILURES % "timeout": 1, FINISHED % "expired": 1, EXPIRED: 1}
    await stack.assert_empty()


@pytest.mark.parametrize("asking", WHOLE, ids=name)
async def test_a_response_that_is_not_complete_in_time_is_408(stack: Stack, asking: Asking) -> None:
    body = asking.body("one two three four", MANY) | {"timeout": 0.05}
    async with one_timeout(stack):
        status, error, headers = await stack.ask(asking.path, body)
    assert (status, "retry-after" in headers, asking.error_word(error) in TIMED_OUT) == (408, False, True), error
    assert "Request timed out: " in str(error)


async def test_a_deadline_that_passes_before_the_queue_counts(stack: Stack) -> None:
    async with one_timeout(stack):
        assert (await stack.ask("/generate", {"inputs": "a"}, {"x-request-timeout-ms": "0.001"})).status == 408


@pytest.mark.parametrize("asking", STREAMED, ids=name)
async def test_a_stream_past_its_deadline_ends_with_an_error(stack: Stack, asking: Asking) -> None:
    body = asking.streamed("one two three four", MANY)
    headers = {"x-request-timeout-ms": "400"}
    async with one_timeout(stack), stack.client.post(asking.path, json=body, headers=headers) as response:
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


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"grpc-timeout": "60m"}, {}),
        ({"x-queue-timeout-ms": "60000"}, {"parameters": {"queue_timeout": 0.06}, "queue_timeout": 3.0}),
    ],
)
async def test_a_request_leaves_the_queue_at_its_queue_timeout(
    demo_model: Path, headers: dict[str, str], fields: dict[str, object]
) -> None:
    # Nothing is known of the server's pace before its first step, which takes longer than the request may wait.
    async with (
        serve(demo_model, chats=False, max_batch_size=1, echo_prefill_us=250_000) as stack,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(stack.generate("one two", max_new_tokens=1))
        await until(lambda: stack.scheduler.stats().running == 1)
        body = {"inputs": "Hello", **fields}
        refused = await stack.ask("/generate_stream", body, headers)
        assert (refused.status, refused.body["error_type"]) == (408, "timeout")
        assert not running.done()
        assert stack.scheduler.stats().waiting == 0
        await running
        assert counts(stack)[FAILURES % "timeout"] == 1


async def test_a_request_whose_estimated_wait_is_too_long_is_refused_at_once(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, max_batch_size=1, echo_step_ms=5) as stack:
        async with stack.client.post("/generate_stream", json=GENERATE.body("one two", MANY)) as running:
            for _ in range(20):
                await running.content.readuntil(b"\n\n")
            refused = await stack.ask("/generate", {"inputs": "Hello", "queue_timeout": 0.1})
            assert (refused.status, refused.body["error_type"]) == (429, "overloaded")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        await stack.assert_empty()


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {"queue_timeout": 0.1}),
        (dict.fromkeys(("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"), "1"), {}),
    ],
    ids=["queue timeout", "target for the first token"],
)
async def test_a_running_request_goes_on(stack: Stack, headers: dict[str, str], fields: dict[str, float]) -> None:
    reply = await stack.ask("/generate", GENERATE.body("one two three four", 40) | fields, headers)
    assert reply.body["details"]["generated_tokens"] == 40


async def test_several_prompts_share_one_deadline(stack: Stack) -> None:
    instances = [
        {"inputs": "Hello", "parameters": {"max_new_tokens": 1}},
        {"inputs": "one two three four", "parameters": {"max_new_tokens": MANY}, "timeout": 0.1},
    ]
    assert (await stack.ask("/vertex", {"instances": instances})).status == 408
    await stack.assert_empty()


INVALID: list[tuple[dict[str, str], dict[str, object], str]] = [
    ({}, {"timeout": 0}, "`timeout` must be > 0"),
    ({"x-slo-ttft-ms": "soon"}, {}, "header `x-slo-ttft-ms` must be"),
]


@pytest.mark.parametrize("asking", [*WHOLE, *STREAMED[:1]], ids=name)
async def test_an_invalid_timeout_is_refused_in_the_routes_dialect(stack: Stack, asking: Asking) -> None:
    """All invalid values: tests/unit/router/api/http/test_caller.py and test_quality_of_service.py."""
    before = counts(stack)
    for headers, fields, words in INVALID:
        status, error, _ = await stack.ask(asking.path, asking.body("Hello", 1) | fields, headers)
        assert status == asking.invalid
        assert f"Input validation error: {words}" in str(error)
        if asking.path == MESSAGES.path:
            assert asking.error_word(error) == "invalid_request_error"
    assert (counts(stack) - before)[FAILURES % "validation"] == len(INVALID)


async def test_interactive_requests_run_before_bulk(demo_model: Path) -> None:
    async with serve(
        demo_model, chats=False, max_batch_size=1, echo_step_ms=2, settings={"max_priority": "system"}
    ) as stack:
        order: list[str] = []

        async def one(word: str, headers: dict[str, str], fields: dict[str, object]) -> None:
            body = {"prompt": "Hello", "max_tokens": 2, **fields}
            assert (await stack.ask("/v1/completions", body, headers)).status == 200
            order.append(word)

        async with stack.client.post("/generate_stream", json=GENERATE.body("one two", 100)) as running:
            await until(lambda: stack.scheduler.stats().running == 1)
            async with asyncio.TaskGroup() as tasks:
                for count, asked in enumerate(
                    [
                        ("bulk", {}, {"service_tier": "flex"}),
                        ("default", {}, {"service_tier": "auto"}),
                        ("urgent", {}, {"priority": -1}),
                        ("most urgent", {"x-smg-priority": "system"}, {"priority": 5}),
                    ],
                    start=1,
                ):
                    tasks.create_task(one(*asked))
                    await until(lambda count=count: stack.scheduler.stats().waiting == count)
            await running.read()
        assert order == ["most urgent", "urgent", "default", "bulk"]
