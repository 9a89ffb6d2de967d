"""Server-sent events of OpenAI and Anthropic, checked against the types of their SDKs."""

from __future__ import annotations

import json
from typing import Any, get_args

from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel

Json = dict[str, Any]


def _by_type(union: object) -> dict[str, type[BaseModel]]:
    members = get_args(get_args(union)[0])
    return {get_args(member.model_fields["type"].annotation)[0]: member for member in members}


RESPONSES = _by_type(ResponseStreamEvent)
MESSAGES = _by_type(RawMessageStreamEvent)


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


def check_types(events: list[Json], types: dict[str, type[BaseModel]]) -> None:
    """Check that every event is valid for its type in the SDK."""
    for event in events:
        types[event["type"]].model_validate(event)
