"""Settings of a process, from its command line and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator
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
from text_generation_proto.topics import Topic

_LEVELS = {"trace": "debug", "warn": "warning", "off": "error"}
"""Levels of TGI's filters that have another name here."""


def _level(text: object) -> object:
    """Return the level that a filter of TGI's sets for all targets; info if it names only targets."""
    if not isinstance(text, str):
        return text
    plain = [part.strip() for part in text.split(",") if "=" not in part]
    level = plain[-1] if plain else "info"
    return _LEVELS.get(level.lower(), level)


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
    """Settings of this class that are not read from the environment."""
    topics: ClassVar[Mapping[Topic, str]] = {Topic.LOGS: "json_output log_level"}
    """The names of the settings of this class, by topic."""
    usages: ClassVar[Sequence[str]] = ("[flags]",)
    """Forms of the command line, without the name of the program, for --help."""
    files: ClassVar[Mapping[str, str]] = {}
    """Settings that are read from files, with the settings that name the files."""

    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)

    json_output: bool = False
    """Log JSON objects, one per line."""
    log_level: Annotated[str, BeforeValidator(_level), Field(pattern="^(?i:debug|info|warning|error)$")] = "info"
    """Least severe level that is logged: debug, info, warning or error. Of a filter as TGI has it, such as
    `warn,text_generation_router=debug`, the level without a target counts."""

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
        return init_settings, _Environment(settings_cls, cls.without_variable())

    @property
    def sources(self) -> Mapping[str, str]:
        """The source of each setting that was given: flag, a variable of the environment, or a file. The others have defaults."""
        return self._sources

    @classmethod
    def without_variable(cls) -> frozenset[str]:
        """Return the settings that only a flag can set."""
        return frozenset().union(*(vars(base).get("flag_only", ()) for base in cls.__mro__))

    @classmethod
    def of(cls, **values: object) -> Self:
        """Return settings with these values and defaults for the rest; the environment is not read."""
        return cls(**{name: cls.default(name) for name in cls.model_fields} | values)

    @classmethod
    def default(cls, name: str) -> Any:  # noqa: ANN401 - of the type of the setting
        """Return the default of a setting."""
        return cls.model_fields[name].get_default(call_default_factory=True, validated_data={})


class SharedSettings(ProcessConfig):
    """The settings that launcher, router and shards share."""

    flag_only: ClassVar[frozenset[str]] = frozenset({"print_config"})
    topics: ClassVar[Mapping[Topic, str]] = {
        Topic.LOGS: "print_config",
        Topic.REPLICAS: "hang_timeout",
        Topic.TRACES: "otlp_endpoint otlp_service_name",
    }

    print_config: bool = False
    """Print the effective settings and the source of each, without secrets, and end. With --json-output as JSON. A flag only."""
    hang_timeout: Annotated[float, Field(ge=0)] = HANG_TIMEOUT_S
    """Seconds without progress after which a replica counts as hung: its sequences move to other replicas, and the launcher
    logs the stacks of its threads, kills and restarts it. A step with prompt tokens has 10 minutes more. The launcher
    also ends a router that does not answer for so long. 0: never; less than 2 is taken as 2."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector that gets traces by OTLP over gRPC, such as http://localhost:4317. Default:
    OTEL_EXPORTER_OTLP_ENDPOINT; without both nothing is traced."""
    otlp_service_name: str = ""
    """Name of the service in traces. Default: OTEL_SERVICE_NAME, else text-generation-inference.router for the router and
    text-generation-inference.server for the shards, as in TGI."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        try:
            # A word alone is hardly a host: without a scheme the port is needed.
            has_port = bool(parts.port) or (parts.port is None and "://" in endpoint)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and has_port
        except ValueError:
            valid = False
        if endpoint and (not valid or "@" in parts.netloc):
            # A password here would be shown with the settings.
            raise ValueError("it must be the URL of a collector, http://HOST:PORT or https://HOST:PORT, without a user")
        return endpoint


class ChildConfig(ProcessConfig):
    """Settings of a process that the launcher starts."""

    flag_only: ClassVar[frozenset[str]] = frozenset({"lifeline_fd", "log_drops_fd"})
    topics: ClassVar[Mapping[Topic, str]] = {Topic.LOGS: "lifeline_fd log_drops_fd"}

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


def parse_config(
    config: type[Config], argv: Sequence[str] | None = None, variables: Mapping[str, str] | None = None
) -> Config:
    """Return the settings from command line and environment. Invalid ones: one line and exit code USAGE.

    --help prints the help and exits. `variables` names the source of settings whose flags stand for other variables.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if (word := _asked_help(argv)) is not None:
        _print_help(config, word)
    if not {"-V", "--version"}.isdisjoint(argv):
        print_to_end(f"{_program(config)} {version('text-generation-trtllm')}\n")
        raise SystemExit(0)
    # Where the case of flags does not matter, pydantic-settings cuts values at line breaks.
    source: CliSettingsSource[Any] = CliSettingsSource(config, case_sensitive=True, cli_exit_on_error=False)
    try:
        parsed = CliApp.run(config, cli_args=argv, cli_settings_source=source)
    except ValidationError as error:
        exit_with_usage_error(config, "; ".join(_message(config, detail) for detail in error.errors()))
    except SettingsError as error:
        message = str(error).removeprefix("error parsing CLI: ")
        exit_with_usage_error(config, message + _hint(config, message))
    from_environment = _Environment(config, config.without_variable())()
    sources = {name: f"environment {name.upper()}" for name in from_environment} | dict.fromkeys(source(), "flag")
    sources |= {name: f"environment {variable}" for name, variable in (variables or {}).items()}
    for name, file in config.files.items():
        if file in sources:
            sources[name] = f"file of --{file.replace('_', '-')}"
    parsed._sources = sources
    return parsed


def _hint(config: type[ProcessConfig], message: str) -> str:
    """Return the flags and commands that are written like the unknown ones of a message; "" if it is about something else."""
    _, unrecognized, words = message.partition("unrecognized arguments:")
    known = [f"--{name.replace('_', '-')}" for name in config.model_fields] + [
        usage.split()[0] for usage in config.usages
    ]
    close = (get_close_matches(word.partition("=")[0].replace("_", "-"), known, 1, 0.75) for word in words.split())
    if meant := [match for matches in close for match in matches]:
        return f"; did you mean {', '.join(meant)}?"
    return "; --help lists the flags" if unrecognized else ""


def _asked_help(argv: Sequence[str]) -> str | None:
    """Return the word after --help, "" without one; None if help is not asked for."""
    for index, argument in enumerate(argv):
        flag, equals, word = argument.partition("=")
        if flag in ("-h", "--help"):
            following = argv[index + 1] if index + 1 < len(argv) else "-"
            return word if equals else "" if following.startswith("-") else following
    return None


def _print_help(config: type[ProcessConfig], word: str) -> NoReturn:
    from text_generation_proto.help import help_page  # not needed otherwise

    try:
        page = help_page(config, word)
    except ValueError as error:
        exit_with_usage_error(config, str(error))
    print_to_end(page)
    raise SystemExit(0)


def print_to_end(text: str) -> None:
    """Write to standard output, for a reader that may leave early, such as a pager."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python would report the error again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_with_usage_error(config: type[ProcessConfig], message: str) -> NoReturn:
    """Write one line to standard error and exit with code USAGE."""
    line = " ".join(f"{_program(config)}: error: {message}".split())
    sys.stderr.write(f"{line}\n")
    raise SystemExit(int(ExitCode.USAGE))


def _program(config: type[ProcessConfig]) -> str:
    return config.model_config.get("cli_prog_name") or Path(sys.argv[0]).name


def _message(config: type[ProcessConfig], error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    given = "" if is_secret(name) else f", not {error['input']!r}"
    variable = "" if name in config.without_variable() else f" (or {name.upper()})"
    return f"--{name.replace('_', '-')}{variable}: {message}{given}"
