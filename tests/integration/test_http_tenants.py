"""Refusals and their Retry-After: permits, the limit of the queue, a draining server; shares of tenants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from every_dialect import GENERATE, STREAMED, VERBATIM, WHOLE, Asking, name
from http_stack import Stack, serve, until

from text_generation_router.request import TenantId

MANY = 1500
BUSY = {"overloaded", "rate_limit_error"}
EVERYWHERE = [(asking, asking.body) for asking in WHOLE] + [(asking, asking.streamed) for asking in STREAMED]
IDS = [name(asking) for asking in WHOLE] + [f"{name(asking)}-stream" for asking in STREAMED]
BodyOf = Callable[[str, int], dict[str, Any]]


@asynccontextmanager
async def endless(stack: Stack, count: int, headers: dict[str, str]) -> AsyncIterator[None]:
    """Run `count` requests with these headers while the block lasts."""
    async with AsyncExitStack() as running:
        before = stack.permits.in_use
        for _ in range(count):
            body = GENERATE.body("one two three four", MANY)
            response = await running.enter_async_context(
                stack.client.post("/generate_stream", json=body, headers=headers)
            )
            assert response.status == 200
        assert stack.permits.in_use == before + count
        yield


async def status_of(stack: Stack, headers: dict[str, str]) -> int:
    return (await stack.ask("/generate", GENERATE.body("Hello", 1), headers)).status


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy(demo_model: Path) -> AsyncIterator[Stack]:
    """A server that runs one request and can queue another."""
    policy = {"max_queued_tokens": 1}
    async with (
        serve(demo_model, chat_template=VERBATIM, max_batch_size=1, policy=policy, echo_step_ms=5) as stack,
        asyncio.TaskGroup() as tasks,
    ):
        async with endless(stack, 1, {}):
            waiting = tasks.create_task(stack.generate("one two three", max_new_tokens=5))
            await until(lambda: stack.scheduler.stats().waiting == 1)
            yield stack
        await waiting
        await stack.assert_empty()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("asking", "body"), EVERYWHERE, ids=IDS)
async def test_a_refusal_has_retry_after_and_comes_before_the_response_begins(
    busy: Stack, asking: Asking, body: BodyOf
) -> None:
    """Refused are requests without a permit, without a place in the queue, and all while the server drains."""

    async def check_refusal(status: int, tokens: int) -> int:
        got, error, headers = await busy.ask(asking.path, body("one two three", tokens))
        assert got == status
        assert status == 503 or asking.error_word(error) in BUSY
        return int(headers["retry-after"])

    async with busy.permits.take(126):
        assert await check_refusal(429, 1) == 1
    assert await check_refusal(429, 5) >= 1
    busy.cluster.draining = True
    assert await check_refusal(503, 1) == 1
    busy.cluster.draining = False
    assert busy.permits.in_use == 2


# --------------------------------------------------------------------------------------------------------------- tenants


@pytest.mark.parametrize(
    ("keys", "flood", "other"),
    [
        ((), {"x-llm-d-inference-fairness-id": "flood"}, {"x-gateway-inference-fairness-id": "other"}),
        ((), {"x-llm-d-inference-fairness-id": "flood"}, {}),
        (("one", "two"), {"x-api-key": "one"}, {"authorization": "Bearer two"}),
    ],
)
async def test_a_tenant_with_all_permits_blocks_only_itself(
    demo_model: Path, keys: tuple[str, ...], flood: dict[str, str], other: dict[str, str]
) -> None:
    async with serve(
        demo_model, chats=False, max_concurrent_requests=2, settings={"api_key": keys}, echo_step_ms=5
    ) as stack:
        async with endless(stack, 2, flood):
            assert await status_of(stack, flood) == 429
            assert await status_of(stack, other) == 200
            async with endless(stack, 1, other):
                assert await status_of(stack, other) == 429
        await until(lambda: stack.permits.in_use == 0)


async def test_a_refusal_is_cheap(demo_model: Path) -> None:
    long = {"inputs": "word " * 100_000}
    async with serve(demo_model, chats=False, max_concurrent_requests=1) as stack, stack.permits.take(1, TenantId("")):
        started = time.thread_time()
        for _ in range(10):
            assert (await stack.ask("/generate", long)).status == 429
        spent = (time.thread_time() - started) / 10
    assert spent < 0.05  # client and server, with the body's half a megabyte read and parsed; tokenizing takes more
