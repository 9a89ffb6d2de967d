"""The options of a command, derived from its settings: the source of --help, docs/flags.md and shell completion."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from text_generation_common.settings import ProcessConfig
from text_generation_common.topics import Topic

PLACEHOLDERS: Mapping[object, str] = {str: "TEXT", int: "N", float: "NUMBER", tuple: "LIST", dict: "LIST"}
"""Names of the values of an option, by their types."""


@dataclass(frozen=True, slots=True)
class Option:
    """A setting as users see it."""

    flag: str
    shortcut: str
    """The flag of one letter; "": none."""
    variable: str
    """The environment variable; "" for a flag without one."""
    choices: tuple[str, ...]
    """Allowed values; empty if free-form."""
    placeholder: str
    """The name of its value; "" for a switch, which has none."""
    default: str
    meaning: str

    @classmethod
    def of(cls, config: type[ProcessConfig], name: str) -> Option:
        """Return the option of a setting."""
        field, kebab = config.model_fields[name], name.replace("_", "-")
        shortcuts = typing.cast("Mapping[str, str]", config.model_config.get("cli_shortcuts") or {})
        return cls(
            flag=f"--{kebab}",
            shortcut=f"-{shortcuts[kebab]}" if kebab in shortcuts else "",
            variable="" if name in config.without_variable() else name.upper(),
            choices=_choices(field.annotation),
            placeholder=_placeholder(field.annotation),
            default=_written(config.default(name)),
            meaning=" ".join((field.description or "").split()),
        )

    @property
    def negation(self) -> str:
        """The flag that turns a switch off; "" for other options."""
        return "" if self.placeholder else f"--no-{self.flag.removeprefix('--')}"


def options_by_topic(config: type[ProcessConfig]) -> dict[Topic, dict[str, Option]]:
    """Return the options of a command by topic and name. Raises ValueError for a setting with no topic, or with two."""
    names: dict[Topic, dict[str, None]] = {topic: {} for topic in Topic}
    for base in config.__mro__:
        for topic, listed in vars(base).get("topics", {}).items():
            names[topic] |= dict.fromkeys(name for name in listed.split() if name in config.model_fields)
    found = [name for listed in names.values() for name in listed]
    if sorted(found) != sorted(config.model_fields):
        wrong = {name for name in {*found, *config.model_fields} if found.count(name) != 1}
        raise ValueError(f"settings with no topic, or with two: {', '.join(sorted(wrong))}")
    return {topic: {name: Option.of(config, name) for name in listed} for topic, listed in names.items() if listed}


def _written(value: object) -> str:
    if value in (None, "", (), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _choices(annotation: object) -> tuple[str, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    if _is_union(annotation):
        return tuple(choice for part in typing.get_args(annotation) for choice in _choices(part))
    return ()


def _placeholder(annotation: object) -> str:
    if annotation is bool:
        return ""
    if typing.get_origin(annotation) is typing.Literal:
        return "CHOICE"
    if _is_union(annotation):
        annotation = typing.get_args(annotation)[0]
        return "true|false" if _without_metadata(annotation) is bool else _placeholder(_without_metadata(annotation))
    return PLACEHOLDERS[typing.get_origin(annotation) or annotation]


def _without_metadata(annotation: object) -> object:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _is_union(annotation: object) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
