"""Options given as YAML or JSON, in a flag or in a file. Names that are there twice, and anchors, are refused."""

import json
from collections.abc import Hashable
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import yaml

from text_generation_shard.engine import EngineError

MAX_BYTES = 1 << 20
"""Largest file that is read."""


def read_options(text: str, flag: str) -> dict[str, object]:
    """Return the options in `text`, the value of `flag`, or in the file that it names; empty if blank. Raises EngineError.

    Text that begins with `{`, or contains a newline or `: `, is YAML or JSON itself; any other text is a path.
    """
    if not text.strip():
        return {}
    inline = text.lstrip().startswith("{") or "\n" in text or ": " in text
    source = flag if inline else f"{flag}: {text if text.isprintable() else repr(text)}"
    try:
        options = _parse(text if inline else _read(Path(text)))
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        problem = where + ", ".join(filter(None, (error.context, error.problem)))
    except (yaml.YAMLError, OSError, UnicodeDecodeError, EngineError) as error:
        problem = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # Raised by PyYAML's constructors for values that do not fit their tag, such as `2026-02-30` or `!!int ''`.
        problem = f"a value does not fit its type ({type(error).__name__}: {error})".partition("\n")[0]
    except RecursionError:
        problem = "is nested too deeply"
    else:
        return options
    raise EngineError(f"{source}: {problem}")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        example = "'{max_num_tokens: 4096}'"
        raise EngineError(f"there is no such file (options can also be given inline: {example})") from None
    if len(data) > MAX_BYTES:
        raise EngineError(f"is longer than {MAX_BYTES} bytes")
    return data.decode()


def _parse(text: str) -> dict[str, object]:
    """Return the names and values in `text`; empty if it has only comments."""
    try:
        # JSON is not always YAML: `1e-3` is a string in YAML 1.1, and tabs are refused.
        options = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        options = yaml.load(text, _StrictLoader)
    if options is None:
        return {}  # only comments
    if not isinstance(options, dict):
        raise EngineError(f"must be names with values, as in `max_num_tokens: 4096`, not {shortened(options)}")
    for name in options:
        if not isinstance(name, str):
            raise EngineError(f"the name {shortened(name)} is not read as text: put it in quotes")
    return options


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON without duplicate names, of which the parser would keep the last."""
    names = [name for name, _ in pairs]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise EngineError(f"{shortened(repeated)} is there twice")
    return dict(pairs)


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate names, and anchors: a few of these stand for a huge value, or for one that contains itself."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="anchors are not supported: repeat the value", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for at, key in enumerate(keys):
            if any(key.value == earlier.value for earlier in keys[:at]):
                raise yaml.MarkedYAMLError(
                    problem=f"{shortened(key.value)} is there twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)
