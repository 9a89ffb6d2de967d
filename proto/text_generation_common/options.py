"""The options of a command, derived from its settings: the source of --help, docs/flags.md and shell completion."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from text_generation_common.settings import ProcessConfig, Topic

PLACEHOLDERS = {
    "string": "TEXT",
    "integer": "N",
    "number": "NUMBER",
    "array": "LIST",
    "object": "LIST",
    "boolean": "true|false",
}
"""Names of the values of an option, by their types in JSON schema."""


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
    def of(cls, config: type[ProcessConfig], name: str, schema: Mapping[str, Any]) -> "Option":
        """Return the option of a setting, given its JSON schema."""
        field, kebab = config.model_fields[name], name.replace("_", "-")
        shortcuts = cast("Mapping[str, str]", config.model_config.get("cli_shortcuts") or {})
        value = schema.get("anyOf", [schema])[0]  # the other one is null
        choices = tuple(value.get("enum", ()))
        placeholder = "CHOICE" if choices else PLACEHOLDERS[value["type"]]
        return cls(
            flag=f"--{kebab}",
            shortcut=f"-{shortcuts[kebab]}" if kebab in shortcuts else "",
            variable="" if name in config.without_variable() else name.upper(),
            choices=choices,
            placeholder="" if field.annotation is bool else placeholder,
            default=_written(config.default(name)),
            meaning=" ".join((field.description or "").split()),
        )

    @property
    def negation(self) -> str:
        """The flag that turns a switch off; "" for other options."""
        return "" if self.placeholder else f"--no-{self.flag.removeprefix('--')}"


def options_by_topic(config: type[ProcessConfig]) -> "dict[Topic, dict[str, Option]]":
    """Return the options of a command by topic and name."""
    names: dict[Topic, dict[str, None]] = {topic: {} for topic in Topic}
    for base in config.__mro__:
        for topic, listed in vars(base).get("topics", {}).items():
            names[topic] |= dict.fromkeys(name for name in listed.split() if name in config.model_fields)
    schemas = config.model_json_schema()["properties"]
    return {
        topic: {name: Option.of(config, name, schemas[name]) for name in listed}
        for topic, listed in names.items()
        if listed
    }


def _written(value: object) -> str:
    if value in (None, "", (), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
