"""The events of a Messages stream, and the whole message."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from answer_events import MESSAGES, ending, read_events, write_answer
from anthropic.types import Message

from text_generation_proto.values import FinishReason
from text_generation_router.api.anthropic.events import MessageWriter, whole_input
from text_generation_router.api.core.chat import AnswerEnd, Finish
from text_generation_router.api.core.ids import Named
from text_generation_router.chat.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from text_generation_router.errors import DeadlineExceeded, GenerationFailed

NAMED = Named("msg_1", 1_700_000_000, "some-model", "native")
STOPPED = ending(Finish.STOP)


def none_cached() -> int:
    return 0


def written(events: list[Event], end: AnswerEnd = STOPPED) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream, checked, and the whole message."""
    return write_answer(MessageWriter(NAMED, 7, none_cached), events, end, MESSAGES, Message)


def test_the_events_of_a_text_come_in_anthropics_order() -> None:
    read, whole = written([TextDelta("Hel"), TextDelta('"lo"\n')])
    assert [event["type"] for event in read] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start = read[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 7)
    assert [event["delta"] for event in read[2:4]] == [
        {"type": "text_delta", "text": "Hel"},
        {"type": "text_delta", "text": '"lo"\n'},
    ]
    assert whole["content"] == [{"type": "text", "text": 'Hel"lo"\n'}]
    assert (whole["id"], whole["model"], whole["stop_reason"]) == ("msg_1", "some-model", "end_turn")
    assert read[-2]["usage"] == whole["usage"]
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (7, 5)


def test_cached_tokens_are_not_counted_as_input() -> None:
    cached = iter([3, 3])
    writer = MessageWriter(NAMED, 7, lambda: next(cached))
    read = read_events(writer.text("Hello") + writer.end(STOPPED))
    counts = {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3}
    assert read[0]["message"]["usage"] == {**counts, "output_tokens": 0}
    assert read[-2]["usage"] == writer.whole()["usage"] == {**counts, "output_tokens": 5}


def test_a_failure_before_any_output_starts_a_message() -> None:
    writer = MessageWriter(NAMED, 7, none_cached)
    start, error = read_events(writer.failed(DeadlineExceeded("too late")))
    assert start["message"]["usage"]["input_tokens"] == 7
    assert error["error"] == {"type": "timeout_error", "message": "Request timed out: too late"}


def test_reasoning_texts_and_tool_uses_are_separate_blocks() -> None:
    read, whole = written(
        [
            ReasoningDelta("hm"),
            TextDelta("Well."),
            ToolCallStart(0, "look"),
            ToolCallArguments(0, '{"a":'),
            ToolCallArguments(0, '"ü"}'),
            ToolCallStart(1, "stop"),
            ToolCallArguments(1, "{}"),
        ],
        ending(Finish.TOOL_CALLS),
    )
    blocks = whole["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == "hm"
    assert (blocks[2]["name"], blocks[2]["input"]) == ("look", {"a": "ü"})
    assert (blocks[3]["name"], blocks[3]["input"]) == ("stop", {})
    assert blocks[2]["id"].startswith("toolu_")
    assert blocks[2]["id"] != blocks[3]["id"]
    assert whole["stop_reason"] == "tool_use"
    starts = [event for event in read if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    assert starts[2]["content_block"] == {"type": "tool_use", "id": blocks[2]["id"], "name": "look", "input": {}}
    deltas = [(event["index"], event["delta"]) for event in read if event["type"] == "content_block_delta"]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "hm"}),
        (1, {"type": "text_delta", "text": "Well."}),
        (2, {"type": "input_json_delta", "partial_json": '{"a":'}),
        (2, {"type": "input_json_delta", "partial_json": '"ü"}'}),
        (3, {"type": "input_json_delta", "partial_json": "{}"}),
    ]


@pytest.mark.parametrize(
    ("finish", "reason", "stop", "told_reason", "told_stop"),
    [
        (Finish.STOP, FinishReason.EOS_TOKEN, None, "end_turn", None),
        (Finish.STOP, FinishReason.STOP_SEQUENCE, "END", "stop_sequence", "END"),
        (Finish.LENGTH, FinishReason.LENGTH, None, "max_tokens", None),
        (Finish.TOOL_CALLS, FinishReason.STOP_SEQUENCE, "END", "tool_use", None),
    ],
)
def test_stop_reasons(
    finish: Finish, reason: FinishReason, stop: str | None, told_reason: str, told_stop: str | None
) -> None:
    read, whole = written([TextDelta("a")], ending(finish, reason, stop))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (told_reason, told_stop)
    assert read[-2]["delta"] == {"stop_reason": told_reason, "stop_sequence": told_stop}


def test_an_empty_answer_is_an_empty_text() -> None:
    _, whole = written([])
    assert whole["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("arguments", ['{"a": [1', "", "[1]", "NaN"])
def test_an_incomplete_input_is_empty(arguments: str) -> None:
    assert whole_input(arguments) == {}


def test_an_input_may_be_deep() -> None:
    deep = '{"a":' * 500 + "1" + "}" * 500
    _, whole = written([ToolCallStart(0, "f"), ToolCallArguments(0, deep)])
    assert orjson.loads(deep) == whole["content"][0]["input"]


def test_a_failure_is_an_error_event() -> None:
    writer = MessageWriter(NAMED, 7, none_cached)
    read = read_events(writer.text("Hel") + writer.failed(GenerationFailed("no memory")))
    assert [event["type"] for event in read] == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert read[-1]["error"] == {"type": "api_error", "message": "Request failed during generation: no memory"}
