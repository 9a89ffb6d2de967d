"""Server-sent events of OpenAI and Anthropic, checked against the types of their SDKs."""

from __future__ import annotations

import json
from typing import Any, Protocol, get_args

import orjson
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel

from text_generation_proto.values import FinishReason
from text_generation_router.api.core.chat import AnswerEnd, Finish
from text_generation_router.chat.events import Event, Kind
from text_generation_router.generation import GenerationResult

Json = dict[str, Any]


def _by_type(union: object) -> dict[str, type[BaseModel]]:
    members = get_args(get_args(union)[0])
    return {get_args(member.model_fields["type"].annotation)[0]: member for member in members}


RESPONSES = _by_type(ResponseStreamEvent)
MESSAGES = _by_type(RawMessageStreamEvent)
TWO_CALLS = (
    Event(Kind.CALL, "look"),
    Event(Kind.ARGUMENTS, '{"a":'),
    Event(Kind.ARGUMENTS, '"ü"}'),
    Event(Kind.CALL, "stop", 1),
    Event(Kind.ARGUMENTS, "{}", 1),
)


def read_events(stream: bytes) -> list[Json]:
    """Return the data of each event; its name must be its type."""
    assert stream.endswith(b"\n\n")
    events = []
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


class Writer(Protocol):
    """A writer of events: the product's `ResponseWriter` or `MessageWriter`."""

    def events(self, events: list[Event]) -> bytes: ...

    def end(self, end: AnswerEnd) -> bytes: ...

    def whole(self) -> object: ...


def ending(finish: Finish, reason: FinishReason = FinishReason.EOS_TOKEN, stop: str | None = None) -> AnswerEnd:
    return AnswerEnd(finish, GenerationResult(reason, "some text", 5, stop))


def write_answer(
    writer: Writer, events: list[Event], end: AnswerEnd, types: dict[str, type[BaseModel]], whole_type: type[BaseModel]
) -> tuple[list[Json], Json]:
    """Return the events of a stream and the whole reply, both checked."""
    read = read_events(b"".join(writer.events([event]) for event in events) + writer.end(end))
    check_types(read, types)
    whole: Json = orjson.loads(orjson.dumps(writer.whole()))
    whole_type.model_validate(whole)
    return read, whole


def check_types(events: list[Json], types: dict[str, type[BaseModel]]) -> None:
    """Check that every event is valid for its type in the SDK."""
    for event in events:
        types[event["type"]].model_validate(event)
