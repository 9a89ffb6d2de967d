"""The progress of the children in one line of the terminal."""

from __future__ import annotations

import shutil

from text_generation_proto.logs import escape
from text_generation_proto.progress import RELAYED, show

_states: dict[str, str] = {}
"""The state of each child that has one, by its name."""


def take_state(name: str, line: bytes) -> bool:
    """Show the state in a line of a child; return False for a line that has none."""
    start = RELAYED.encode()
    if not line.startswith(start):
        return False
    show_state(name, line.removeprefix(start).decode(errors="backslashreplace").strip())
    return True


def show_state(name: str, text: str) -> None:
    """Show the state of a child in place of its last one; "" removes it."""
    if _states.get(name, "") == text:
        return
    _states.pop(name, None)
    if text:
        _states[name] = escape(text)
    columns = shutil.get_terminal_size().columns
    show(" · ".join(f"{name}: {state}" for name, state in sorted(_states.items()))[: columns - 1])
