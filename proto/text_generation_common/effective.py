"""The text of --print-config: the effective settings of processes, the source of each, and no secret."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from text_generation_common.command_line import print_to_end
from text_generation_common.secrets import is_secret
from text_generation_common.settings import ProcessConfig

DEFAULT = "default"
COLUMNS = 44
"""Columns of a value; a longer one moves its source to the right."""


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings of a process, and the sources of those without their default."""

    config: ProcessConfig
    sources: Mapping[str, str]


def masked(config: ProcessConfig) -> dict[str, Any]:
    """Return the settings as JSON values, secrets as ***."""
    values = config.model_dump(mode="json").items()
    # A number is not a secret: a token's id has the same name as a token.
    return {
        name: "***" if value and not isinstance(value, int) and is_secret(name) else value for name, value in values
    }


def print_config(processes: Mapping[str, Effective], *, json_output: bool) -> None:
    """Write the settings of processes by name to standard output, one a line, or as one line of JSON."""
    found = {
        process: {
            name: {"value": value, "source": settings.sources.get(name, DEFAULT)}
            for name, value in masked(settings.config).items()
        }
        for process, settings in processes.items()
    }
    if json_output:
        print_to_end(f"{json.dumps(found, ensure_ascii=sys.stdout.encoding.lower() != 'utf-8')}\n")
        return
    width = max(len(name) for settings in found.values() for name in settings)
    lines = []
    for process, settings in found.items():
        lines.append(f"{process}:")
        for name, each in settings.items():
            value = json.dumps(each["value"], ensure_ascii=True)
            lines.append(f"  {name:{width}}  {value:{COLUMNS}}  {each['source']}")
    print_to_end("\n".join(lines) + "\n")


def print_own_config(process: str, config: ProcessConfig) -> None:
    """Write the settings of this process alone."""
    print_config({process: Effective(config, config.sources)}, json_output=config.json_output)
