"""The events of a Messages stream, and the whole message."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from answer_events import MESSAGES, TWO_CALLS, ending, read_events, write_answer
from anthropic.types import Message

from text_generation_proto.values import FinishReason
from text_generation_router.api.anthropic.messages import MessageWriter, whole_input
from text_generation_router.api.core.chat import AnswerEnd, Finish
from text_generation_router.api.core.ids import Named
from text_generation_router.chat.events import Event, Kind
from text_generation_router.errors import DeadlineExceeded, GenerationFailed, ServingError

NAMED = Named("msg_1", 1_700_000_000, "some-model", "native")
STOPPED = ending(Finish.STOP)


def written(events: list[Event], end: AnswerEnd = STOPPED) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream, checked, and the whole message."""
    return write_answer(MessageWriter(NAMED, 7, lambda: 0), events, end, MESSAGES, Message)


def test_reasoning_texts_and_tool_uses_are_separate_blocks_in_anthropics_order() -> None:
    read, whole = written(
        [
            Event(Kind.REASONING, "hm"),
            Event(Kind.TEXT, "Hel"),
            Event(Kind.TEXT, '"lo"\n'),
            *TWO_CALLS,
        ],
        ending(Finish.TOOL_CALLS),
    )
    assert [event["type"].removeprefix("content_block_") for event in read] == [
        *("message_start", "start", "delta", "stop", "start", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop", "start", "delta", "stop", "message_delta", "message_stop"),
    ]
    start = read[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 7)
    assert (whole["id"], whole["model"], whole["stop_reason"]) == ("msg_1", "some-model", "tool_use")
    assert read[-2]["usage"] == whole["usage"]
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (7, 5)
    thought, text, look, stop = whole["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm")
    assert text == {"type": "text", "text": 'Hel"lo"\n'}
    assert (look["type"], look["name"], look["input"]) == ("tool_use", "look", {"a": "ü"})
    assert (stop["name"], stop["input"]) == ("stop", {})
    assert look["id"].startswith("toolu_")
    assert look["id"] != stop["id"]
    starts = [event for event in read if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    assert starts[2]["content_block"] == {"type": "tool_use", "id": look["id"], "name": "look", "input": {}}
    deltas = [(event["index"], event["delta"]) for event in read if event["type"] == "content_block_delta"]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "hm"}),
        (1, {"type": "text_delta", "text": "Hel"}),
        (1, {"type": "text_delta", "text": '"lo"\n'}),
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
    read, whole = written([Event(Kind.TEXT, "a")], ending(finish, reason, stop))
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
    _, whole = written([Event(Kind.CALL, "f"), Event(Kind.ARGUMENTS, deep)])
    assert orjson.loads(deep) == whole["content"][0]["input"]


@pytest.mark.parametrize(
    ("before", "error", "told"),
    [
        (["Hel"], GenerationFailed("no memory"), ("api_error", "Request failed during generation: no memory")),
        ([], DeadlineExceeded("too late"), ("timeout_error", "Request timed out: too late")),
    ],
)
def test_a_failure_is_the_last_event_of_a_message(
    before: list[str], error: ServingError, told: tuple[str, str]
) -> None:
    writer = MessageWriter(NAMED, 7, lambda: 0)
    read = read_events(b"".join(map(writer.add, before)) + writer.failed(error))
    text = ["content_block_start", "content_block_delta"] if before else []
    assert [event["type"] for event in read] == ["message_start", *text, "error"]
    assert read[0]["message"]["usage"]["input_tokens"] == 7
    assert tuple(read[-1]["error"].values()) == told
