"""Settings of a process, from its command line and environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from text_generation_proto.exit_codes import ExitCode
from text_generation_proto.heartbeat import HANG_TIMEOUT_S
from text_generation_proto.secrets import is_secret


class ProcessConfig(BaseSettings):
    """Settings of every process. Precedence: command line, environment (the flag in upper snake case), default.

    An empty environment variable counts as unset.
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

    flag_only: ClassVar[frozenset[str]] = frozenset()
    """Settings that are not read from the environment."""

    json_output: bool = False
    """Log JSON objects, one per line."""
    log_level: Annotated[str, Field(pattern="^(?i:debug|info|warning|error)$")] = "info"
    """Least severe level that is logged: debug, info, warning or error."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read values from arguments and environment; pydantic-settings itself puts the command line first."""
        return init_settings, _Environment(settings_cls, cls.flag_only)

    @classmethod
    def of(cls, **values: object) -> Self:
        """Return settings with these values and defaults for the rest; the environment is not read."""
        defaults = {
            name: field.get_default(call_default_factory=True, validated_data={})
            for name, field in cls.model_fields.items()
        }
        return cls(**(defaults | values))


class HangSettings(ProcessConfig):
    """The setting that launcher, router and shards share."""

    hang_timeout: Annotated[float, Field(ge=0)] = HANG_TIMEOUT_S
    """Seconds without progress after which a replica counts as hung: its sequences move to other replicas, and the launcher
    logs the stacks of its threads, kills and restarts it. A step with prompt tokens has 10 minutes more. The launcher
    also ends a router that does not answer for so long. 0: never; less than 2 is taken as 2."""


class ChildConfig(ProcessConfig):
    """Settings of a process that the launcher starts."""

    flag_only: ClassVar[frozenset[str]] = frozenset({"lifeline_fd", "log_drops_fd"})

    lifeline_fd: int = -1
    """Inherited pipe whose end of file means that the parent died; set by the launcher."""
    log_drops_fd: int = -1
    """Inherited eventfd to which launcher and shards add the log lines that they drop, for the router; set by the launcher."""


class _Environment(EnvSettingsSource):
    """The environment, without the settings that only a flag can set."""

    def __init__(self, settings_cls: type[BaseSettings], flag_only: frozenset[str]) -> None:
        super().__init__(settings_cls)
        self._flag_only = flag_only

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__call__().items() if name not in self._flag_only}


Config = TypeVar("Config", bound=ProcessConfig)


def parse_config(config: type[Config], argv: Sequence[str] | None = None) -> Config:
    """Return the settings from command line and environment. Invalid ones: one line and exit code USAGE."""
    # Where the case of flags does not matter, pydantic-settings cuts values at line breaks.
    source: CliSettingsSource[Any] = CliSettingsSource(config, case_sensitive=True, cli_exit_on_error=False)
    try:
        return CliApp.run(config, cli_args=list(sys.argv[1:] if argv is None else argv), cli_settings_source=source)
    except ValidationError as error:
        exit_with_usage_error(config, "; ".join(_message(detail) for detail in error.errors()))
    except SettingsError as error:
        exit_with_usage_error(config, str(error).removeprefix("error parsing CLI: "))


def exit_with_usage_error(config: type[ProcessConfig], message: str) -> NoReturn:
    """Write one line to standard error and exit with code USAGE."""
    prog = config.model_config.get("cli_prog_name") or Path(sys.argv[0]).name
    line = " ".join(f"{prog}: error: {message}".split())
    sys.stderr.write(f"{line}\n")
    raise SystemExit(int(ExitCode.USAGE))


def _message(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    given = "" if is_secret(name) else f", not {error['input']!r}"
    return f"--{name.replace('_', '-')} (or {name.upper()}): {message}{given}"
