"""Strict YAML and JSON of an operator: text that does not mean what it seems to mean is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from reprlib import repr as shortened

import yaml

MAX_BYTES = 1 << 20
"""Largest file that is read."""


class Malformed(Exception):
    """The text cannot be parsed; the message does not name its source."""


def read_text(path: Path) -> str:
    """Return the text of a file. Raises Malformed."""
    try:
        if path.exists() and not path.is_file():
            raise Malformed("is not a file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        example = "'{max_num_tokens: 4096}'"
        raise Malformed(f"there is no such file (options can also be given inline: {example})") from None
    except (OSError, ValueError) as error:
        raise Malformed(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise Malformed(f"is longer than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"is not UTF-8: {error.reason} at byte {error.start}") from None


def parse_mapping(text: str) -> dict[str, object]:
    """Return the names and values in `text`; empty if it has only comments. Raises Malformed."""
    try:
        options = _parse_json(text) if text.lstrip().startswith("{") else None
        if options is None:
            _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader))
            options = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise Malformed(where + ", ".join(part for part in (error.context, error.problem) if part)) from None
    except yaml.YAMLError as error:
        raise Malformed(str(error).partition("\n")[0]) from None
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # Raised by PyYAML's constructors for values that do not fit their tag, such as `2026-02-30` or `!!int ''`.
        raise Malformed(f"a value does not fit its type ({type(error).__name__}: {error})".partition("\n")[0]) from None
    except RecursionError:
        raise Malformed("is nested too deeply") from None
    if options is None:
        return {}  # only comments
    if not isinstance(options, dict):
        raise Malformed(f"must be names with values, as in `max_num_tokens: 4096`, not {shortened(options)}")
    return options


def _parse_json(text: str) -> dict[str, object] | None:
    """Return the object in `text`; None if it is not JSON (it may be YAML in braces).

    JSON is not always YAML: `1e-3` is a string in YAML 1.1, and tabs are refused.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        _check_unique((name, "") for name, _ in pairs)
        return dict(pairs)

    try:
        parsed: dict[str, object] = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError:
        return None
    return parsed


def _check_nodes(root: yaml.Node | None) -> None:
    """Refuse text that `safe_load` would read differently from how it looks."""
    if isinstance(root, yaml.MappingNode):
        for key, _ in root.value:
            if key.tag != "tag:yaml.org,2002:str":
                name = shortened(key.value if isinstance(key, yaml.ScalarNode) else f"a {key.id}")
                raise Malformed(f"{_line(key)}: the name {name} is not read as text: put it in quotes")
    seen: set[int] = set()
    pending = [] if root is None else [root]
    while pending:
        node = pending.pop()
        if id(node) in seen:
            # An alias: a few of them can stand for a huge value, or for one that contains itself.
            raise Malformed(f"{_line(node)}: anchors are not supported: repeat the value")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        elif isinstance(node, yaml.MappingNode):
            _check_unique((key.value, f"{_line(key)}: ") for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            pending += [part for pair in node.value for part in pair]


def _check_unique(names: Iterable[tuple[str, str]]) -> None:
    """Refuse duplicate names, of which both parsers silently keep the last; each is given with its place."""
    seen: set[str] = set()
    for name, place in names:
        if name in seen:
            raise Malformed(f"{place}{shortened(name)} is there twice")
        seen.add(name)


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"
