"""No body survives the refusal of its request: without garbage collection, because nothing refers to itself."""

from __future__ import annotations

import asyncio
import gc
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from http_stack import Stack, served, until

from text_generation_router import admission_queue
from text_generation_router.api.openai.schemas import ChatBody
from text_generation_router.chat.conversation import Conversation
from text_generation_router.errors import ServingError
from text_generation_router.web.bodies import Body
from text_generation_router.web.body_reader import MAX_HUGE, MAX_INLINE, MAX_PREPARED

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPIN: dict[str, Any] = {"messages": [{"role": "user", "content": "spin"}]}
SLOW_TEMPLATE = (
    "{{ messages[0].content }}{% if messages[0].content == 'spin' %}{{ 7 ** (messages | length * 10 ** 8) }}{% endif %}"
)
LONG = "words " * 1000
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}


stack = served(
    max_concurrent_requests=4, echo_step_ms=5, chat_template=SLOW_TEMPLATE, settings={"payload_limit": 2_900_000}
)


def held() -> list[object]:
    """The bodies, conversations and errors in memory, also those that only the garbage collector would find."""
    kinds = {Body, Conversation, ServingError}
    while more := {kind for known in kinds for kind in known.__subclasses__()} - kinds:
        kinds |= more
    return [each for each in gc.get_objects() if type(each) in kinds]


@asynccontextmanager
async def nothing_left() -> AsyncIterator[set[int]]:
    """Assert that the block leaves no body and no error in memory, soon and without garbage collection.

    Yield the ids of those that other tests keep.
    """
    gc.collect()
    gc.disable()
    try:
        before = {id(each) for each in held()}
        yield before
        with suppress(TimeoutError):
            async with asyncio.timeout(15):
                await until(lambda: {id(each) for each in held()} <= before)
        assert [each for each in held() if id(each) not in before] == []
    finally:
        gc.enable()


async def post(stack: Stack, path: str, body: Any, headers: dict[str, str] | None = None) -> int:  # noqa: ANN401
    sent = {"data": io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())}
    headers = {"content-type": "application/json", **(headers or {})}
    async with stack.client.post(path, headers=headers, **sent) as response:
        await response.read()
        return response.status


REFUSED = {
    "400": ("/generate", b'{"inputs": "' + b"a" * 100_000, None),
    "413": ("/generate", b" " * 3_000_000, None),
    "400 of the body": ("/v1/chat/completions", CHAT | {"n": 0}, None),
    "400 of a large body": ("/v1/chat/completions", CHAT | {"n": 0, "suffix": LONG * 20}, None),
    "400 of a rule": ("/v1/chat/completions", CHAT | {"temperature": -1}, None),
    "422 of the length": ("/generate", {"inputs": LONG * 20}, None),
    "422 of one of several": ("/vertex", {"instances": [{"inputs": LONG * 20}, {"inputs": "a"}]}, None),
    "400 of the template": ("/v1/chat/completions", SPIN, None),
    "408": ("/generate", {"inputs": LONG}, {"x-request-timeout-ms": "30"}),
    "408 of one of several": ("/vertex", {"instances": [{"inputs": LONG}] * 2}, {"x-request-timeout-ms": "30"}),
    "408 of a stream": ("/generate_stream", {"inputs": LONG}, {"x-request-timeout-ms": "1"}),
    "408 of a chat": ("/v1/chat/completions", CHAT | {"max_tokens": 900}, {"x-request-timeout-ms": "30"}),
    "408 of a response": ("/v1/responses", {"input": LONG}, {"x-request-timeout-ms": "30"}),
}


IN_TIME = {("408 of a stream", 200), ("400 of the template", 503)}
"""Further statuses: the time may end after the headers, and a busy machine may give the sandbox no time."""


@pytest.mark.parametrize("kind", REFUSED)
async def test_nothing_is_left_of_a_refused_request(stack: Stack, kind: str) -> None:
    path, body, headers = REFUSED[kind]
    async with nothing_left():
        status = await post(stack, path, body, headers)
        assert status == int(kind[:3]) or (kind, status) in IN_TIME


@asynccontextmanager
async def running(stack: Stack, count: int, path: str, body: Any) -> AsyncIterator[None]:  # noqa: ANN401
    """Requests that run while the block does, then their clients leave."""
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(post(stack, path, body)) for _ in range(count)]
        await until(lambda: stack.permits.in_use == count)
        yield
        for other in others:
            other.cancel()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": LONG}),
        ("/generate_stream", {"inputs": LONG}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 900, "stream": True}),
        ("/v1/messages", CHAT | {"max_tokens": 900}),
        ("/v1/chat/completions", SPIN),
        ("/vertex", {"instances": [{"inputs": LONG}]}),
    ],
)
async def test_nothing_is_left_when_clients_leave_or_there_are_too_many(stack: Stack, path: str, body: Any) -> None:  # noqa: ANN401
    async with nothing_left() as before, running(stack, 4, path, body):
        assert await post(stack, path, body) == 429
        # The other requests hold bodies of their own, but no error.
        await until(lambda: not [each for each in held() if isinstance(each, ServingError) and id(each) not in before])


@pytest.mark.parametrize(("length", "places"), [(20, MAX_PREPARED), (400, MAX_HUGE)])
async def test_large_bodies_are_parsed_in_turns_of_tenants(stack: Stack, length: int, places: int) -> None:
    """A tenant has few of its large bodies in memory as objects, and another one's is not behind them."""
    quiet = {"x-llm-d-inference-fairness-id": "quiet"}
    large, spin = {"inputs": "a " * MAX_INLINE}, SPIN | {"suffix": LONG * length}
    if places == MAX_HUGE:
        large["pad"] = LONG * length
    assert await post(stack, "/tokenize", large, quiet) == 200

    def parsed() -> int:
        return sum(isinstance(each, ChatBody) for each in held())

    async with asyncio.TaskGroup() as tasks:
        noisy = [tasks.create_task(post(stack, "/v1/chat/completions", spin)) for _ in range(8)]
        await until(lambda: parsed() >= places - 1)
        assert await post(stack, "/tokenize", large, quiet) == 200
        assert parsed() == places - 1
        for request in noisy:
            request.cancel()


async def test_nothing_is_left_of_a_chat_that_found_no_worker(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_queue, "MAX_WAIT_S", 0.1)
    async with nothing_left(), running(stack, 2, "/v1/chat/completions", SPIN):
        assert await post(stack, "/v1/chat/completions", CHAT) == 503


async def test_nothing_is_left_of_a_request_while_the_server_drains(stack: Stack) -> None:
    async with nothing_left():
        stack.cluster.draining = True
        try:
            assert await post(stack, "/v1/chat/completions", CHAT) == 503
        finally:
            stack.cluster.draining = False
