"""Lists of modules in a quantization config: names, patterns with *, regular expressions after `re:`, parts of names.

A config names the modules of a text part with or without the prefix that it has in a model of text and images, whatever the
checkpoint does. Names are compared without it; an expression may match any of the names.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import regex

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.weights.checkpoint import names_of_text_part, text_name
from text_generation_shard.engines.torch.weights.quantization.format import UnsupportedSchemeError

REGEX = "re:"
MAX_REGEXES = 16
"""Regular expressions in one list."""
REGEX_S = 0.1
"""Seconds of matching a regular expression with a module's name. A hostile one would not end."""


def module_names(given: object) -> tuple[str, ...]:
    """Return a list of modules of a config after checking its type and its regular expressions."""
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise UnsupportedSchemeError("the modules that a quantization ignores must be a list of names")
    regexes = [name.removeprefix(REGEX) for name in given if name.startswith(REGEX)]
    if len(regexes) > MAX_REGEXES:
        raise UnsupportedSchemeError(f"{len(regexes)} regular expressions of modules to ignore: at most {MAX_REGEXES}")
    for expression in regexes:
        try:
            regex.compile(expression)
        except regex.error as error:
            raise UnsupportedSchemeError(
                f"{REGEX + expression[:100]!r}, a module to ignore, is not a regular expression: {error}"
            ) from None
    return tuple(name if name.startswith(REGEX) else text_name(name) for name in given)


def parts_of_names(given: object) -> tuple[str, ...]:
    """Return a list of `modules_to_not_convert`: each means the modules whose name contains it, between dots, which it then has."""
    return tuple(name if name.startswith(REGEX) else f".{name.strip('.')}." for name in module_names(given))


def matches_any(module: str, patterns: Sequence[str]) -> bool:
    """Return True if the module, for example model.layers.0.mlp.down_proj, is one of those that `patterns` mean."""
    module = text_name(module)
    return any(_matches(module, pattern) for pattern in patterns)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith(REGEX):
        expression = pattern.removeprefix(REGEX)
        try:
            return any(regex.match(expression, name, timeout=REGEX_S) for name in names_of_text_part(module))
        except TimeoutError:
            raise EngineError(f"{pattern[:100]!r}, modules without quantization, takes too long to match") from None
    if pattern.startswith("."):
        # A list can have a thousand names, which a model with thousands of experts compares with each of them.
        dotted = f".{module}."
        return pattern in dotted or ("*" in pattern and fnmatchcase(dotted, f"*{pattern}*"))
    return fnmatchcase(module, pattern)
