"""Reports to a test, also in another process, what reached the stand-in: one line of JSON per event.

{"event": "request", "id", "prompt", "sampling", "cache_salt"}    generate_async: `sampling` has the fields of SamplingParams
                                                                  that differ from their defaults
{"event": "abort", "id"}
{"event": "end", "id", "reason", "tokens"}    stop, length, cancelled, error; `dropped`: cancelled while it waited, never answered
{"event": "shutdown"}                         shutdown began
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path
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


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """The events so far."""

    events: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> Log:
        """Read the complete lines of a file that may still grow."""
        text = path.read_text() if path.exists() else ""
        return cls(tuple(json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")))

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the events of a kind, in order."""
        return [entry for entry in self.events if entry["event"] == event]

    @property
    def ends(self) -> Counter[str]:
        """Reason → number of requests that ended so."""
        return Counter(entry["reason"] for entry in self.of("end"))

    @property
    def unfinished(self) -> set[int]:
        """Ids of requests without an end."""
        return {entry["id"] for entry in self.of("request")} - {entry["id"] for entry in self.of("end")}


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
