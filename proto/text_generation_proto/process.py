"""What a process of ours owes the one that started it: settings, exit codes, a lifeline, a clean socket.

Launcher and child speak through argv, signals, exit codes and one inherited pipe. That is a protocol as shard.proto is
one, so it lives beside it.

The lifeline: the launcher holds the only write end of a pipe; each child inherits the read end. End of file means that
the launcher is gone, however it died. The child then stops as if it had got SIGTERM, and has LIFELINE_GRACE seconds for
it: `follow_parent` sees to both.

The socket: who serves a unix socket calls `claim_socket` before it listens and `remove_socket` when it stops. Where the
launcher has thought up a private folder for its sockets, these two make that folder and remove it again: so it is there
only while somebody lives who will remove it, and nothing is left in the file system even where the launcher was killed.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

LIFELINE_GRACE = 1.5
"""Seconds a process has to stop in order once its parent is dead."""

PRIVATE_FOLDER_PREFIX = "tgi-sockets-"
"""How the name of a folder starts that exists for the sockets of one launcher's shards."""


class ExitCode(IntEnum):
    """How a process of ours ended. A process that a signal killed has minus the signal's number, as everywhere."""

    STOPPED = 0
    """Asked to stop (SIGTERM, SIGINT, SIGHUP), and did, whatever phase it was in."""
    FAILED = 1
    """Could not start or go on; the last log line says why. The launcher: a shard or the router did not start."""
    USAGE = 2
    """The settings make no sense; one line on standard error names the setting."""
    BUG = 70
    """A broken invariant; the log has a traceback."""
    DEPENDENCY_LOST = 75
    """A process this one needs went away while serving. The launcher: the router died, or the last shard where none is
    to be restarted. Worth a restart."""
    HOPELESS = 76
    """The launcher: the shards died again and again, and none serves. Worth a look: a restart would end the same way."""


class ProcessConfig(BaseSettings):
    """Settings every process has. Precedence: command line, environment (the flag in upper snake case), default.

    An empty environment variable counts as none.
    """

    model_config = SettingsConfigDict(
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        frozen=True,
        extra="forbid",
    )

    flag_only: ClassVar[frozenset[str]] = frozenset({"lifeline_fd"})
    """Settings that the environment does not set."""

    json_output: bool = False
    """Log one JSON object a line."""
    log_level: Annotated[str, Field(pattern="^(?i:debug|info|warning|error)$")] = "info"
    """debug, info, warning or error."""
    lifeline_fd: int = -1
    """Inherited pipe whose end of file says that the parent died; set by the launcher."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The command line is put first by pydantic-settings itself."""
        return init_settings, _Environment(settings_cls, cls.flag_only)

    @classmethod
    def of(cls, **values: object) -> Self:
        """These values, and defaults for the rest: the environment has no say."""
        defaults = {
            name: field.get_default(call_default_factory=True, validated_data={})
            for name, field in cls.model_fields.items()
        }
        return cls(**(defaults | values))


class _Environment(EnvSettingsSource):
    """The environment, less the settings that only a flag can set."""

    def __init__(self, settings_cls: type[BaseSettings], flag_only: frozenset[str]) -> None:
        super().__init__(settings_cls)
        self._flag_only = flag_only

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__call__().items() if name not in self._flag_only}


Config = TypeVar("Config", bound=ProcessConfig)


def parse_config(config: type[Config], argv: Sequence[str] | None = None) -> Config:
    """The settings from the command line and the environment; on nonsense, one line and exit code USAGE."""
    try:
        return CliApp.run(config, cli_args=None if argv is None else list(argv), cli_exit_on_error=False)
    except ValidationError as error:
        exit_with_usage_error(config, "; ".join(_complaint(detail) for detail in error.errors()))
    except SettingsError as error:
        exit_with_usage_error(config, str(error).removeprefix("error parsing CLI: "))


def exit_with_usage_error(config: type[ProcessConfig], complaint: str) -> NoReturn:
    """Say what is wrong with the settings and exit with code USAGE."""
    prog = config.model_config.get("cli_prog_name") or Path(sys.argv[0]).name
    line = " ".join(f"{prog}: error: {complaint}".split())
    sys.stderr.write(f"{line}\n")
    raise SystemExit(int(ExitCode.USAGE))


def _complaint(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    return f"--{name.replace('_', '-')} (or {name.upper()}): {message}, not {error['input']!r}"


def follow_parent(lifeline_fd: int, last_will: Callable[[], None] | None = None) -> None:
    """Stop when the parent dies: SIGTERM to this process, and LIFELINE_GRACE seconds later SIGKILL to its group.

    Call it first thing in `main`, from the main thread, before any slow import; without a lifeline it does nothing.
    `last_will` is for what must not be left behind: it runs just before that SIGKILL, and at a SIGTERM that comes before
    the event loop has a handler of its own. It must not need the event loop, which is what hangs by then.
    """
    if lifeline_fd < 0:
        return

    def stop_while_starting(_signal: int, _frame: FrameType | None) -> None:
        if last_will is not None:
            last_will()
        os._exit(ExitCode.STOPPED)  # an exception would be lost in whatever is being imported

    signal.signal(signal.SIGTERM, stop_while_starting)
    _wake_when_parent_dies()
    threading.Thread(target=_follow, args=(lifeline_fd, last_will), name="lifeline", daemon=True).start()


def _follow(lifeline_fd: int, last_will: Callable[[], None] | None) -> None:
    select.select([lifeline_fd], [], [])  # nobody ever writes: readable means end of file
    # The parent read our output, too: from now on a log record would raise BrokenPipeError in whoever writes it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LIFELINE_GRACE)
    try:
        if last_will is not None:
            last_will()
    finally:
        if os.getpgrp() == os.getpid():  # our own group, as the launcher starts us: an engine's workers go too
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _wake_when_parent_dies() -> None:
    """Ask the kernel for SIGCONT when the parent dies (Linux; elsewhere nothing): a process that was stopped, by a
    debugger or by hand, could not see the end of its lifeline.

    Not SIGTERM, which would come before the output is put right; not SIGKILL, which leaves no time to stop in order.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGCONT))


def socket_path(address: str) -> Path | None:
    """The file of a unix:///path address; None for host:port."""
    return Path(address.removeprefix("unix://")) if address.startswith("unix://") else None


class SocketInUse(Exception):
    """Another server answers on this socket."""


def claim_socket(path: Path) -> None:
    """Make way for a server on this socket: make its folder if that is a private one, remove what a crash left there.

    Raises SocketInUse if somebody serves it. gRPC would remove the file without asking, and so take the socket from a
    server that runs.
    """
    if path.parent.name.startswith(PRIVATE_FOLDER_PREFIX):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.parent.stat().st_uid != os.geteuid():
            raise SocketInUse(f"{path.parent} belongs to somebody else")
    if not path.is_socket():
        if path.exists():
            raise SocketInUse(f"{path} is there and is no socket")
        return
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        else:
            raise SocketInUse(f"a server already listens on {path}")


def remove_socket(path: Path) -> None:
    """Remove the socket of a server that has stopped, and its folder if that is a private one and empty."""
    path.unlink(missing_ok=True)
    if path.parent.name.startswith(PRIVATE_FOLDER_PREFIX):
        try:
            path.parent.rmdir()
        except OSError:  # another shard's socket is still in it, or it is gone already
            return
