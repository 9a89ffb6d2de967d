"""Rules of llguidance's dialect of Lark, written piece by piece.

A special token has no text for a matcher: a rule names its id. So the caller says which texts are special tokens.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from text_generation_common.grammar_options import JSON_OPTIONS
from text_generation_router.grammar.schema import Schema, as_text

_LEXEMES = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\s]+>|(%json)\s*')
"""The parts of rules in which %json means nothing (texts, comments, expressions, special tokens), and %json itself."""
_HEAD = "%llguidance {}"
_FREE = r"FREE: /(.|\n)*/"


def embedded_schemas(text: str) -> Iterator[object]:
    """Yield the JSON after each %json in rules, which a client may have written. Raises ValueError, RecursionError."""
    at, decoder = 0, json.JSONDecoder()
    while (found := _LEXEMES.search(text, at)) is not None:
        at = found.end()
        if found[1]:
            schema, at = decoder.raw_decode(text, at)
            yield schema


class LarkRules:
    """Collects the rules of one grammar. The methods return expressions for other rules."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """`special`: the ids of the special tokens by their texts."""
        self._special = special
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: list[str] = []
        self._known: dict[str, str] = {}

    def literal(self, text: str) -> str:
        """Return the expression of a fixed text, in which special tokens may occur."""
        return " ".join(self._pieces(text)) or '""'

    def until(self, end: str, inside: Sequence[str] = ()) -> str:
        """Return any text up to `end` and `end` itself, which must not be empty; the special tokens `inside` may occur."""
        pieces = self._pieces(end)
        if not pieces[0].startswith("<["):
            if len(pieces) > 1:
                return self.rule(f"{self.free} {pieces[0]}", terminal=True) + " " + " ".join(pieces[1:])
            return self.rule(f"{self.free} {pieces[0]}", attributes="[lazy]")
        return f"{self.free_with(inside)} {' '.join(pieces)}"

    def schema(self, schema: Schema) -> str:
        """Return the expression of a normalised schema. Raises InvalidRequest."""
        return self.rule(f"%json {as_text({'x-guidance': JSON_OPTIONS, **schema})}")

    def regex(self, expression: str) -> str:
        """Return the expression of a regular expression."""
        if not expression:
            return '""'
        written = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), expression)
        return self.rule(f"/{written}/", terminal=True)

    def nested(self, grammar: str) -> str:
        """Return the expression of a whole grammar, with rules of its own."""
        body = "\n".join(line for line in grammar.split("\n") if not line.startswith("%llguidance"))
        return self.rule(f"%lark {{\n{body}\n}}")

    def named(self, name: str, rules: Sequence[str]) -> str:
        """Return `name`, one of `rules`, which have names of their own and are written once."""
        for rule in rules:
            if rule not in self._known:
                self._known[rule] = name
                self._rules.append(rule)
        return name

    def rule(self, expression: str, *, attributes: str = "", terminal: bool = False) -> str:
        """Return a name for an expression; equal expressions have the same."""
        key = f"{attributes}{expression}"
        if key not in self._known:
            name = f"{'T' if terminal else 'r'}{len(self._rules)}"
            self._known[key] = name
            self._rules.append(f"{name}{attributes}: {expression}")
        return self._known[key]

    @property
    def free(self) -> str:
        """The expression of any text."""
        return self.named("FREE", [_FREE])

    def free_with(self, inside: Sequence[str]) -> str:
        """Return the expression of any text in which the special tokens `inside` may occur."""
        marks = [f"<[{self._special[mark]}]>" for mark in inside if mark in self._special]
        return self.rule(f"{self.free} (({' | '.join(marks)}) {self.free})*") if marks else self.free

    def written(self, start: str) -> str:
        """Return the grammar whose start is the expression `start`."""
        return "\n".join([_HEAD, f"start: {start}", *self._rules]) + "\n"

    def _pieces(self, text: str) -> list[str]:
        pieces, at = [], 0
        for found in self._markers.finditer(text):
            pieces += [_quoted(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return [piece for piece in (*pieces, _quoted(text[at:])) if piece]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
