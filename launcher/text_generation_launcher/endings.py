"""How serving ends other than by a wish, and how the end of a process reads in the log."""

from __future__ import annotations

import signal


class ChildFailed(Exception):
    """A shard or the router ended before everything was ready."""


class ChildLost(Exception):
    """The router ended by itself while serving; or so did the last shard, where none is to be restarted."""


class ShardsHopeless(Exception):
    """No shard serves, and each has died more often in a row than it may be restarted."""


def ending(code: int) -> dict[str, object]:
    """The exit code of a process, and the signal that killed it if one did, as fields of a log record."""
    return {"exit_code": code} if code >= 0 else {"exit_code": code, "signal": _name(-code)}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return str(number)
