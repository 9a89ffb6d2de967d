"""Translates EBNF rules and structural tags to llguidance's dialect of Lark. Runs in the sandbox: a client wrote them.

EBNF             GBNF as of llama.cpp, vLLM and SGLang (`root ::= …`); Lark rules are recognised and left as they are
structural tag   {"format": {"type": …}}, and the older {"structures": [{"begin", "schema", "end"}], "triggers": […]}
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.grammar.lark import LarkRules
from text_generation_router.grammar.normalize import normalize, without_anchors
from text_generation_router.grammar.schema import check_length, not_compilable, not_valid, read_schema

TRANSLATED = (GrammarKind.EBNF, GrammarKind.STRUCTURAL_TAG)

_LARK = re.compile(r"^\s*(?:%llguidance\b|[?!]?start(?:\.\d+)?\s*:(?!:=))", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_KEPT_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t", '"': r"\"", "\\": r"\\", "[": r"\[", "]": r"\]"}

Json = Mapping[str, Any]


def translated(grammar: Grammar, special: Mapping[str, int]) -> Grammar:
    """Return the grammar in a language that llguidance reads; `special`: its special tokens. Raises InvalidRequest."""
    match grammar.kind:
        case GrammarKind.EBNF:
            text = _lark(grammar.text)
        case GrammarKind.STRUCTURAL_TAG:
            text = _Tags(special).written(json.loads(grammar.text))
        case _:
            return grammar
    check_length(text)
    return Grammar(GrammarKind.LARK, text)


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _LARK.search(text) is not None:
        return text
    try:
        return gbnf_to_lark(_ESCAPE.sub(_unescaped, text))
    except RecursionError:
        raise not_compilable("the grammar is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
        raise not_valid(str(error)) from None


def _unescaped(found: re.Match[str]) -> str:
    """Return an escaped character as itself: the library writes short escapes that no reader takes."""
    number = found[1] or found[2] or found[3]
    if number is None:
        return found[0]
    code = int(number, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise not_valid(f"invalid character {found[0]}")
    return _KEPT_ESCAPES.get(chr(code), chr(code))


class _Tags:
    """Writes the rules of one structural tag."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._rules = LarkRules(special)

    def written(self, tag: Json) -> str:
        if "structures" in tag:
            tags = [
                {
                    "begin": _text(item, "begin"),
                    "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
                }
                | {"end": _text(item, "end")}
                for item in _objects(tag, "structures")
            ]
            form: Json = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
        else:
            form = _object(tag, "format")
        return self._rules.written(self._format(form))

    def _format(self, form: Json) -> str:
        """Return the expression of a format. Raises InvalidRequest."""
        kind = form.get("type")
        write = _WRITERS.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise not_valid(f"the type {str(kind)[:32]!r} of a structural tag is not supported")
        return write(self, form)

    def const_string(self, form: Json) -> str:
        return self._rules.literal(_text(form, "value"))

    def json_schema(self, form: Json) -> str:
        if form.get("style", "json") != "json":
            raise not_valid(f"`style` {str(form['style'])[:32]!r} is not supported, only `json`")
        schema = form.get("json_schema")
        schema = read_schema({} if schema is True else schema)
        normalize(schema)
        return self._rules.schema(schema)

    def any_text(self, form: Json) -> str:
        _refuse(form, "excludes")
        return self._rules.free

    def regex(self, form: Json) -> str:
        _refuse(form, "excludes")
        return self._rules.regex(without_anchors(_text(form, "pattern")))

    def grammar(self, form: Json) -> str:
        return self._rules.nested(_lark(_text(form, "grammar")))

    def sequence(self, form: Json) -> str:
        return " ".join(self._each(form, "elements"))

    def any_of(self, form: Json) -> str:
        return _any(self._each(form, "elements"))

    def repeated(self, form: Json) -> str:
        sign = {"optional": "?", "star": "*", "plus": "+"}[form["type"]]
        return f"({self._format(_object(form, 'content'))}){sign}"

    def tag(self, form: Json) -> str:
        return self._tag(form, _text(form, "begin"))

    def _each(self, form: Json, key: str) -> list[str]:
        return [self._rules.rule(self._format(item)) for item in _objects(form, key)]

    def _tag(self, tag: Json, begin: str) -> str:
        """Return the expression of a tag; `begin` is the part of its start that is still to be written."""
        ends = tag.get("end")
        ends = ends if isinstance(ends, list) else [_text(tag, "end")]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise not_valid("`end` of a tag must be a text, or a list of texts")
        content = _object(tag, "content")
        head = [self._rules.literal(begin)] if begin else []
        if content.get("type") == "any_text" and all(ends):
            _refuse(content, "excludes")
            return " ".join([*head, _any([self._rules.until(end) for end in ends])])
        return " ".join([*head, self._format(content), _any([self._rules.literal(end) for end in ends])])

    def triggered(self, form: Json) -> str:
        """Return free text in which the rest of a tag follows every trigger."""
        _refuse(form, "excludes")
        triggers, tags = form.get("triggers"), _objects(form, "tags")
        if (
            not isinstance(triggers, list)
            or not triggers
            or not all(isinstance(text, str) and text for text in triggers)
        ):
            raise not_valid("`triggers` must be a list of texts that are not empty")
        rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            begin = _text(tag, "begin")
            trigger = max((text for text in triggers if begin.startswith(text)), key=len, default=None)
            if trigger is None:
                raise not_valid(f"no trigger is the start of the tag {begin[:64]!r}")
            rests[trigger].append(self._rules.rule(self._tag(tag, begin.removeprefix(trigger))))
        groups = [f"{self._rules.until(trigger)} {_any(rest)}" for trigger, rest in rests.items() if rest]
        group = self._rules.rule(" | ".join(groups))
        if form.get("stop_after_first"):
            return group if form.get("at_least_one") else f"({group} | {self._rules.free})"
        return f"{group}{'+' if form.get('at_least_one') else '*'} {self._rules.free}"

    def separated(self, form: Json) -> str:
        tags = [self._rules.rule(self._tag(tag, _text(tag, "begin"))) for tag in _objects(form, "tags")]
        one = self._rules.rule(" | ".join(tags))
        separator = _text(form, "separator")
        more = f" ({self._rules.literal(separator)} {one})*" if separator else f" {one}*"
        expression = one if form.get("stop_after_first") else one + more
        return expression if form.get("at_least_one") else f"({expression})?"


_WRITERS: dict[str, Callable[[_Tags, Json], str]] = {
    "const_string": _Tags.const_string,
    "json_schema": _Tags.json_schema,
    "any_text": _Tags.any_text,
    "regex": _Tags.regex,
    "grammar": _Tags.grammar,
    "sequence": _Tags.sequence,
    "or": _Tags.any_of,
    "optional": _Tags.repeated,
    "star": _Tags.repeated,
    "plus": _Tags.repeated,
    "tag": _Tags.tag,
    "triggered_tags": _Tags.triggered,
    "tags_with_separator": _Tags.separated,
}


def _any(expressions: Sequence[str]) -> str:
    return f"({' | '.join(expressions)})"


def _refuse(form: Json, key: str) -> None:
    if form.get(key):
        raise not_valid(f"`{key}` of a structural tag is not supported")


def _object(form: Json, key: str) -> Json:
    value = form.get(key)
    if not isinstance(value, dict):
        raise not_valid(f"`{key}` of a structural tag must be an object")
    return value


def _objects(form: Json, key: str) -> list[Json]:
    values = form.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        raise not_valid(f"`{key}` of a structural tag must be a list of objects that is not empty")
    return values


def _text(form: Json, key: str) -> str:
    value = form.get(key)
    if not isinstance(value, str):
        raise not_valid(f"`{key}` of a structural tag must be a text")
    return value
