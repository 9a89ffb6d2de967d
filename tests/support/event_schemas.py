"""The OpenAPI document with schemas of single events, for schemathesis."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def describe_events(document: Json) -> None:
    """Let the schema of a stream be that of one event: schemathesis reads one at a time."""
    for operation in (operation for methods in document["paths"].values() for operation in methods.values()):
        content = operation["responses"]["200"].get("content", {})
        if (media := content.get("text/event-stream")) is not None:
            data = {"type": "string", "contentMediaType": "application/json", **media["schema"]}
            event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
            media["schema"] = event
