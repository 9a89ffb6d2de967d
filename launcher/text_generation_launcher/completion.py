"""The completion of `text-generation-launcher` for shells."""

from argparse import ArgumentParser
from typing import Any

import shtab

from text_generation_common.help import first_sentence
from text_generation_common.options import Option, options_by_topic
from text_generation_launcher.config import COMMANDS, LauncherCheckConfig, LauncherConfig

SHELLS = ("bash", "zsh", "fish")
FOLDERS = ("model_id", "huggingface_hub_cache")
"""Settings that name a folder."""
FILES_END = ("_file", "_path", "_cert", "_key", "_ca", "_template", "_options", "trace_steps")
"""Ends of the names of settings that name a file."""


def completion_script(shell: str) -> str:
    """Return the script that completes commands, flags and values in a shell. Raises ValueError for another shell."""
    if shell not in SHELLS:
        raise ValueError(f"completion {shell}: the shells are {', '.join(SHELLS)}")
    parser = ArgumentParser(str(LauncherConfig.model_config.get("cli_prog_name")))
    _add_options(parser, LauncherConfig)
    commands = parser.add_subparsers()
    for name, (_, meaning) in COMMANDS.items():
        command = commands.add_parser(name, help=meaning)
        if name == "completion":
            command.add_argument("shell", choices=SHELLS)
            continue
        if name == "convert":
            _completed(command.add_argument("file"), shtab.FILE)
            _completed(command.add_argument("folder"), shtab.DIRECTORY)
            continue
        if name == "check":
            _completed(command.add_argument("model"), shtab.DIRECTORY)
            command.add_argument("--json", action="store_true", help="Print JSON.")
        _add_options(command, LauncherCheckConfig if name == "check" else LauncherConfig)
    script: str = shtab.complete(parser, shell)
    return script


def _add_options(parser: ArgumentParser, config: type[LauncherConfig]) -> None:
    for options in options_by_topic(config).values():
        for name, option in options.items():
            _add_option(parser, name, option)


def _add_option(parser: ArgumentParser, name: str, option: Option) -> None:
    flags = [flag for flag in (option.shortcut, option.flag) if flag]
    meaning = first_sentence(option.meaning).replace("%", "%%")
    if not option.placeholder:
        parser.add_argument(*flags, option.negation, action="store_true", help=meaning)
        return
    values = option.choices or (("true", "false") if option.placeholder == "true|false" else None)
    added = parser.add_argument(*flags, choices=values, help=meaning)
    if values is None and name in FOLDERS:
        _completed(added, shtab.DIRECTORY)
    elif values is None and name.endswith(FILES_END):
        _completed(added, shtab.FILE)


def _completed(argument: Any, kind: object) -> None:  # noqa: ANN401 - shtab reads an attribute that it adds
    argument.complete = kind
