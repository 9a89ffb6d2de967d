"""The Jinja dialect of chat templates, as transformers defines it (utils/chat_template_utils.py), and the job that renders.

The router imports this module to parse templates, and the template worker to compile and render them. Parsing runs
nothing of a template; compiling does, because constants are folded (`'a' * 10**10`), so only a worker compiles. The module
imports nothing but Jinja: a worker must be small and start fast.
"""

import importlib
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

TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message in the rendered text. Its trailing space shows if the template trims."""


TOO_LONG = "the text is longer than"
"""Begins the error for a text above the limit."""
LATE_IMPORTS = ("encodings.unicode_escape", "jinja2.constants", "jinja2.debug", "pprint", "textwrap", "urllib.parse")
"""Modules that Jinja imports when it first needs them, which a confined worker cannot."""


class RenderError(Exception):
    """The conversation could not be rendered."""


def renderer(config: dict[str, Any]) -> Callable[[], Callable[[bytes], bytes]]:
    """Return a function that compiles the templates and returns the job. It raises RenderError.

    `config`: `sources`, template texts by name; `max_characters` of a text.
    """
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    return lambda: _renderer(config)


def _renderer(config: dict[str, Any]) -> Callable[[bytes], bytes]:
    """Return the job: a function from {template, variables, continue_final} as JSON to the text as UTF-8."""
    environment = template_environment()
    templates = {name: _compile(environment, name, text) for name, text in config["sources"].items()}
    max_characters: int = config["max_characters"]

    def render(payload: bytes) -> bytes:
        request = json.loads(payload)
        template, variables = templates[request["template"]], request["variables"]
        for message in variables["messages"]:
            for call in message.get("tool_calls", ()):
                if isinstance(arguments := call["function"].get("arguments"), dict):
                    call["function"]["arguments"] = _Arguments(arguments)
        if request["continue_final"]:
            text = _render_for_continuation(template, variables, max_characters)
        else:
            text = _render(template, variables, max_characters)
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise RenderError("the text is not valid Unicode") from None

    return render


def _compile(environment: jinja2.Environment, name: str, text: str) -> jinja2.Template:
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise RenderError(f"chat template {name!r} is nested too deeply") from error


def _render(template: jinja2.Template, variables: dict[str, Any], max_characters: int) -> str:
    pieces, length = [], 0
    try:
        for piece in template.generate(variables):
            length += len(piece)
            if length > max_characters:
                raise RenderError(f"{TOO_LONG} {max_characters} characters")
            pieces.append(piece)
    except RecursionError:
        raise RenderError("the template recurses too deeply") from None
    return "".join(pieces)


def _render_for_continuation(template: jinja2.Template, variables: dict[str, Any], max_characters: int) -> str:
    """Return the text up to the end of the final message's content, which is marked by a tag, as in transformers.

    A template that trims the message also trims the space of the tag; then the text before the tag is trimmed too.
    """
    final, place = variables["messages"][-1], "content"
    if isinstance(final[place], list):  # for a template that reads parts
        final, place = final[place][-1], "text"
    content = final[place]
    final[place] = content + TAG
    text = _render(template, variables, max_characters + len(TAG))
    end = text.rfind(TAG.rstrip())
    if end < 0 or content.strip() not in text:
        raise RenderError("the template does not show the final message, so it cannot be continued")
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return an environment that parses and compiles chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's text for training. Here it renders its body.

    It is a call block, as in transformers: variables set inside are not visible outside.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

    def parse(self, parser: Parser) -> CallBlock:
        """Return the block as a call of `_show` with the body as caller."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = CallBlock(self.call_method("_show"), [], [], body)
        block.set_lineno(line)
        return block

    @pass_eval_context
    def _show(self, context: EvalContext, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as `dict` has it
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as `dict` has it
        return dict.fromkeys(*args, **kwargs)


class _Arguments(dict[str, Any]):
    """The arguments of a call: an object, and its JSON where a template joins it with text, as those of DeepSeek do."""

    def __add__(self, other: str) -> str:
        return _to_json(self) + other

    def __radd__(self, other: str) -> str:
        return other + _to_json(self)


class _Namespace(Namespace):
    """`namespace` without attributes that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as `dict` has it
        this, rest = args[0], args[1:]  # allows `namespace(self=...)`
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
    """Return JSON without HTML escapes, which Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
