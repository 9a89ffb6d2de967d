"""Reports to a test, also in another process, what reached the stand-in: one line of JSON per event.

{"event": "start", …}                         some arguments of LLM
{"event": "request", "id", "prompt", "sampling", "cache_salt"}    generate_async: `sampling` has the fields of SamplingParams
                                                                  that differ from their defaults
{"event": "wait", "id"}                       the engine had too few KV blocks for a request that it had taken
{"event": "span", …}                          the engine made a span of a request, with these trace headers
{"event": "abort", "id"}
{"event": "raced", "id"}                      an abort by one thread while another one shuts the library down
{"event": "end", "id", "reason", "tokens"}    stop, length, cancelled, error; `dropped`: cancelled while it waited, never answered
{"event": "shutdown"}                         shutdown began
{"event": "greedy"}                           a request that samples is greedy, because the drafter allows nothing else
{"event": "usage"}                            the LLM reported usage to NVIDIA
{"event": "blocked"}                          the thread that makes requests waited for statistics
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any


class Recorder:
    """Writes events to a file, if any. A line is one write to a file opened to append, so processes may share it."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else -1

    def write(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON
        """Add a line. May be called from any thread."""
        if self._file >= 0:
            os.write(self._file, json.dumps({"event": event, **fields}, default=plain).encode() + b"\n")

    @property
    def is_on(self) -> bool:
        """True if events are written."""
        return self._file >= 0


def changed_fields(params: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass of either release
    """Return the fields that differ from their defaults."""
    default = type(params)()
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return {name: plain(value) for name, value in values.items() if not _is_equal(value, getattr(default, name))}


def plain(value: Any) -> Any:  # noqa: ANN401 - anything to JSON
    """Return `value` as JSON; a tensor becomes index → value of the entries that are not zero."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return changed_fields(value)
    if hasattr(value, "nonzero") and hasattr(value, "tolist"):
        flat = value.reshape(-1)
        indices = flat.nonzero().reshape(-1).tolist()
        return {str(index): float(flat[index]) for index in indices}
    if value is None or isinstance(value, str | int | float | bool | list | tuple | dict):
        return value
    return repr(value)


def _is_equal(value: Any, other: Any) -> bool:  # noqa: ANN401 - tensors compare by element
    return value is other if hasattr(value, "nonzero") else bool(value == other)
