"""The Jinja dialect of chat templates, as Hugging Face transformers defines it (utils/chat_template_utils.py).

Imported by the router, which only parses templates, and by the worker that renders them. Parsing runs nothing of a
template; compiling does, as constants are folded (`'a' * 10**10`), so only a worker may compile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, EvalContext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context


def template_environment() -> ImmutableSandboxedEnvironment:
    """Where chat templates are parsed and compiled."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks for training what the assistant wrote. Here it shows its body.

    It is a call block, as in transformers: variables that are set inside are not seen outside.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

    def parse(self, parser: Parser) -> CallBlock:
        """The block as a call of `_show` with the body as caller."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = CallBlock(self.call_method("_show"), [], [], body)
        block.set_lineno(line)
        return block

    @pass_eval_context
    def _show(self, context: EvalContext, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict`, without what hangs on the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as `dict` has it
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as `dict` has it
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace`, without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as `dict` has it
        this, rest = args[0], args[1:]  # so that `namespace(self=...)` is possible
        values = dict(*rest, **kwargs)
        for name in values:
            _Namespace._check(name)
        Namespace.__init__(this, values)

    def __setitem__(self, name: str, value: object) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position
) -> str:
    """Jinja's own filter escapes HTML; this one does not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
