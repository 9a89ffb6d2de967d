"""The client of text-generation-benchmark: HTTP, the events of each dialect."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import pytest

from text_generation_bench.load.dialects import AnswerStream, BodyMaker, refusal
from text_generation_bench.load.http_client import HttpClient, HttpFailure, Response

EVENTS = b'data: {"a": 1}\n\n: comment\n\ndata: {"b": "\r\n0\\r\\n"}\r\n\r\n'


def chunked(*parts: bytes, trailer: bytes = b"") -> bytes:
    """Return parts as a chunked body."""
    return b"".join(b"%x;note\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
RESPONSES = {
    "chunked": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS[:9], EVENTS[9:10], EVENTS[10:]), True),
    "trailer": (HEAD + b"transfer-encoding: Chunked\r\n\r\n" + chunked(EVENTS, trailer=b"x: y\r\n"), False),
    "length": (HEAD + b"content-length: %d\r\n\r\n" % len(EVENTS) + EVENTS, True),
    "continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS, True),
    "close": (HEAD + b"Connection: close\r\n\r\n" + EVENTS, False),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_read_alike_for_every_split_of_its_bytes(name: str) -> None:
    data, is_kept = RESPONSES[name]
    splits = [(at, at + width) for width in (1, 3) for at in range(len(data))]
    for first, second in [*splits, (len(data), len(data))]:
        body: list[tuple[float, bytes]] = []
        response = Response(lambda stamp, part, into=body: into.append((stamp, part)))
        for stamp, part in enumerate((data[:first], data[first:second], data[second:])):
            if part:
                response.feed(stamp, part)
        assert b"".join(part for _, part in body) == EVENTS
        assert response.close()
        assert response.status == 200
        if name != "trailer":  # whether a trailer is seen depends on the split
            assert response.keep_alive == is_kept
        begins = data.index(EVENTS[:9])
        assert body[0][0] == sum(begins >= split for split in (first, second)), "the time is that of its bytes"


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
                                  HEAD + b"Content-Length: -1\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20000])  # fmt: skip
def test_bytes_that_are_no_http_are_a_failure(data: bytes) -> None:
    with pytest.raises(HttpFailure, match=r"no HTTP response|too long"):
        Response(lambda stamp, part: None).feed(0.0, data)


def openai(**fields: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None} | fields]}


CHAT_USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4}},
}
CHAT = [
    openai(delta={"role": "assistant", "content": ""}),
    openai(delta={"role": "assistant", "reasoning_content": "Hm"}),
    openai(delta={"role": "assistant", "content": "Hel"}),
    openai(delta={"content": "lo"}),
    openai(delta={"tool_calls": [{"index": 0}]}),
    openai(delta={"content": ""}, finish_reason="stop"),
    CHAT_USAGE,
]
COMPLETION = [openai(text=" a"), openai(text=""), openai(text="é"), openai(text="", finish_reason="length")]
TGI = [
    {"index": 1, "token": {"id": 1, "text": "He", "special": False}, "generated_text": None, "details": None},
    {"index": 2, "token": {"id": 2, "text": "</s>", "special": True}, "generated_text": "He",
     "details": {"finish_reason": "eos_token", "generated_tokens": 2, "input_length": 5}},
]  # fmt: skip


RESPONSES_EVENTS = [
    {"type": "response.created", "response": {"error": None, "usage": None}},
    {"type": "response.reasoning_text.delta", "delta": "Hm"},
    {"type": "response.output_text.delta", "delta": "Hello"},
    {"type": "response.output_text.done", "text": "Hello"},
    {
        "type": "response.completed",
        "response": {
            "usage": {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}},
        },
    },
]
MESSAGES_EVENTS = [
    {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 0}},
    },
    {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "Hm"}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hello"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
]


@pytest.mark.parametrize(
    ("dialect", "events", "times", "tokens", "text"),
    [
        ("responses", RESPONSES_EVENTS, [1, 2], 3, "Hello"),
        ("anthropic", MESSAGES_EVENTS, [2, 3], 3, "Hello"),
        ("openai-chat", CHAT, [1, 2, 3, 4], 6, "Hello"),
        ("openai", COMPLETION, [0, 1, 2], 3, " aé"),
        ("tgi", TGI, [0, 1], 2, "He"),
    ],
)
def test_tokens_are_events_with_text_or_the_servers_count(
    dialect: str, events: list[dict[str, Any]], times: list[int], tokens: int, text: str
) -> None:
    stream = AnswerStream(dialect, wants_text=True)
    for stamp, event in enumerate(events):
        data = b"data:" + json.dumps(event).encode() + b"\n\n"
        stream.feed(stamp, data[:20])
        stream.feed(stamp, data[20:])
    assert (stream.times, stream.tokens, stream.text, stream.has_ended) == (times, tokens, text, True)
    assert stream.error == ""
    if dialect == "openai-chat":
        assert (stream.prompt_tokens, stream.cached_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'data: {"error": {"message": "boom", "code": 1}}\n\n', "boom"),
        (b'data: {"error": "Request failed", "error_type": "generation"}\n\n', "Request failed"),
        (b"data: {nonsense\n\n", "no JSON in an event: {nonsense"),
        (b"data: [1]\n\n", "an event is no JSON object"),
        (
            b'data: {"generated_text":"","details":3}\n\n',
            'an event has another form: {"generated_text":"","details":3}',
        ),
    ],
)
def test_an_error_in_a_stream_is_its_text(data: bytes, error: str) -> None:
    stream = AnswerStream("tgi", wants_text=False)
    stream.feed(0.0, data)
    assert stream.error == error


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": "Model is overloaded"}', "429: Model is overloaded"),
        (b'{"error": {"message": "slow down"}}', "429: slow down"),
        (b'{"detail": "Not Found"}', "429: Not Found"),
        (b"<html>Bad gateway</html>", "429: <html>Bad gateway</html>"),
        (b"", "429"),
    ],
)
def test_a_refusal_has_status_and_message(body: bytes, text: str) -> None:
    assert refusal(429, body) == text


def test_a_body_has_the_turns_before_it_and_can_lose_a_field() -> None:
    turns = [("one", "first"), ("two", "")]
    chat = json.loads(
        BodyMaker("openai-chat", "m", {"top_p": 0.5}, {"ignore_eos": None, "user": "u"}).body("sys", turns, 5)
    )
    assert [message["content"] for message in chat["messages"]] == ["sys", "one", "first", "two"]
    assert (chat["max_tokens"], chat["top_p"], chat["user"], "ignore_eos" in chat) == (5, 0.5, "u", False)
    tgi = json.loads(BodyMaker("tgi", "m", {"seed": 3}, {}).body("sys", turns, 5))
    assert tgi == {"inputs": "sys one first two", "parameters": {"max_new_tokens": 5, "details": True, "seed": 3}}
    ids = json.loads(BodyMaker("openai", "m", {}, {}).body([1, 2], [([3], "")], 5))
    assert ids["prompt"] == [1, 2, 3]


@asynccontextmanager
async def serving(
    answer: Callable[[int, asyncio.StreamWriter], Awaitable[None]], timeout: float = 5
) -> AsyncIterator[HttpClient]:
    """A client of a raw server; `answer` writes the response to a request, given its number on its connection."""

    handlers: list[asyncio.Task[Any] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            for number in count():
                await reader.readuntil(b"\r\n\r\n{}")
                await answer(number, writer)
                await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix", {}, None, timeout)
    try:
        yield client
    finally:
        client.close()
        server.close()
        await asyncio.wait([task for task in handlers if task is not None])


async def test_parsing_one_stream_does_not_delay_the_stamps_of_the_others() -> None:
    writers, parsed = list[asyncio.StreamWriter](), list[tuple[float, float]]()

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        for each in writers if len(writers) == 2 else ():  # both are ready in the same turn of the event loop
            each.write(HEAD + b"Content-Length: 4\r\n\r\ndata")

    def slow(stamp: float, part: bytes) -> None:
        began = time.perf_counter()
        while time.perf_counter() == began:
            pass
        parsed.append((stamp, time.perf_counter()))

    async with serving(answer) as client, asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(client.post("/x", b"{}", slow))
    (_, first_end), (second_stamp, _) = parsed
    assert second_stamp < first_end


async def test_a_kept_connection_that_the_server_closed_is_replaced_once() -> None:
    requests: list[int] = []

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        requests.append(number)
        if number == 0:
            writer.write(HEAD + b"Content-Length: 2\r\n\r\nok")
        else:
            writer.close()

    async with serving(answer) as client:
        for _ in range(2):
            assert (await client.post("/x", b"{}", lambda stamp, part: None)).status == 200
    assert requests == [0, 1, 0]


@pytest.mark.parametrize(
    ("written", "failure"),
    [
        (b"", "closed the connection"),
        (RESPONSES["length"][0][:-3], "closed the connection"),
        (RESPONSES["chunked"][0][:-3], "closed the connection"),
        (b"SSH-2.0\r\n\r\n", "no HTTP"),
    ],
)
async def test_a_response_that_breaks_off_is_a_failure(written: bytes, failure: str) -> None:
    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(written)
        writer.close()

    async with serving(answer) as client:
        with pytest.raises(HttpFailure, match=failure):
            await client.post("/x", b"{}", lambda stamp, part: None)


async def test_a_server_that_does_not_answer_runs_into_the_timeout() -> None:
    never = asyncio.Event()

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        await never.wait()

    async with serving(answer, timeout=0.1) as client:
        with pytest.raises(HttpFailure, match=r"no end after 0\.1 s"):
            await client.post("/x", b"{}", lambda stamp, part: None)
        never.set()
