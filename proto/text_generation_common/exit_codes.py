"""Exit codes of the launcher, the router and the shards."""

import signal
from enum import IntEnum
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


class ExitCode(IntEnum):
    """Exit code of a process. A process that was killed by a signal has minus the signal's number, as in subprocess."""

    STOPPED = 0
    """Stopped after SIGTERM, SIGINT or (without api_keys_file) SIGHUP, in any phase."""
    FAILED = 1
    """Could not start or continue; the last log line gives the reason. Launcher: a shard or the router did not start."""
    USAGE = 2
    """Invalid settings; one line on standard error names the setting."""
    BUG = 70
    """A broken invariant; the log has a traceback."""
    DEPENDENCY_LOST = 75
    """A process that this one needs ended while serving. Launcher: a process of the router died or hung repeatedly; with
    --max-shard-restarts 0, the router or the last shard did so once. A restart may help."""
    HOPELESS = 76
    """Launcher: the shards died repeatedly and none serves. A restart would end the same way."""


class CannotServe(Exception):
    """The server cannot start. The message is one line; the process exits with FAILED."""


def first_error(group: BaseExceptionGroup[Error]) -> Error:
    """Return the first error in nested groups."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first


def exit_fields(code: int) -> dict[str, object]:
    """Return an exit code, and the name of the signal that killed the process if any, as fields of a log record."""
    if code >= 0:
        return {"exit_code": int(code)}
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have no name
    return {"exit_code": code, "signal": names.get(-code, str(-code))}
