"""Command line of a process: its settings, or the help, the version or one line about an error."""

import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import CliApp, CliSettingsSource, SettingsError

from text_generation_common.exit_codes import ExitCode
from text_generation_common.help import help_page
from text_generation_common.secrets import is_secret
from text_generation_common.settings import Environment, ProcessConfig

Config = TypeVar("Config", bound=ProcessConfig)


def parse_config(
    config: type[Config], argv: Sequence[str] | None = None, variables: Mapping[str, str] | None = None
) -> Config:
    """Return the settings from command line and environment. Invalid ones: one line and exit code USAGE.

    --help prints the help and exits. `variables` names the environment variables behind flags that were added for them.
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
    from_environment = Environment(config, config.without_variable())()
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
    known = [f"--{name.replace('_', '-')}" for name in config.model_fields]
    known += [usage.split()[0] for usage in config.usages]
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
    within = "".join(f"{key}: " for key in error["loc"][1:])
    return f"--{name.replace('_', '-')}{variable}: {within}{message}{given}"
