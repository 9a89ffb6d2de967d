"""Limits of regular expressions, checked in one pass over the text, without backtracking.

llguidance is an automaton and follows `(a+)+`; but clients validate the texts with engines that backtrack, and those do
not. The scan is no parser: a malformed expression passes, and llguidance names its fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_EXPRESSION = 4096
"""Characters of one expression."""
MAX_EXPANSION = 20_000
"""Characters of an expression with its counted repetitions written out: an engine may find out only in a later step."""
_MAX_DEPTH = 64
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(?=[\d,]*\d)(\d*)(,?)(\d*)\})\??")
_GROUP_HEAD = re.compile(r"\?(?:[^:>=!)]{0,63}(?:[:>=!]|(?=\))))?")
_ESCAPED = re.compile(r"[pPux]\{[^}]{0,62}\}|.", re.DOTALL)


class BadExpression(ValueError):
    """The expression is refused; `str()` is the reason."""


@dataclass(slots=True)
class _Atom:
    """One element of a sequence, with its repetition."""

    size: int
    nullable: bool
    bare_loop: bool = False
    """True if it may consist of an unbounded repetition alone: a second unbounded repetition makes it ambiguous."""


@dataclass(slots=True)
class _Group:
    """An open group: the sum of its finished alternatives, and the atoms of the current one."""

    size: int = 1
    nullable: bool = False
    bare_loop: bool = False
    atoms: list[_Atom] = field(default_factory=list)

    def end_alternative(self) -> None:
        solid = sum(not atom.nullable for atom in self.atoms)
        self.size += sum(atom.size for atom in self.atoms)
        self.nullable |= solid == 0
        self.bare_loop |= any(atom.bare_loop and (solid - (not atom.nullable)) == 0 for atom in self.atoms)
        self.atoms = []

    def as_atom(self) -> _Atom:
        self.end_alternative()
        return _Atom(self.size, self.nullable, self.bare_loop)


def check_expression(expression: str) -> None:
    """Refuse an expression that is too long, too large or repeats a repetition. Raises BadExpression."""
    if len(expression) > MAX_EXPRESSION:
        raise BadExpression(f"an expression is longer than {MAX_EXPRESSION} characters")
    groups = [_Group()]
    position = 0
    while position < len(expression):
        position = _step(expression, position, groups)
        if len(groups) > _MAX_DEPTH:
            raise BadExpression(f"an expression has groups more than {_MAX_DEPTH} levels deep")
    while len(groups) > 1:
        groups[-2].atoms.append(groups.pop().as_atom())
    _check_expansion(groups[0].as_atom().size)


def without_anchors(expression: str) -> str:
    """Return the expression without `^` in front and `$` at the end: here it always matches the whole text."""
    body = expression.removeprefix("^")
    if body.endswith("$"):
        escapes = len(body[:-1]) - len(body[:-1].rstrip("\\"))
        if escapes % 2 == 0:
            body = body[:-1]
    return body


def _step(text: str, at: int, groups: list[_Group]) -> int:
    """Read one element at `at`; return the start of the next one."""
    group, character = groups[-1], text[at]
    if character == "(":
        groups.append(_Group())
        return _end(_GROUP_HEAD, text, at + 1)
    if character == ")" and len(groups) > 1:
        groups.pop()
        groups[-1].atoms.append(group.as_atom())
    elif character == "|":
        group.end_alternative()
    elif group.atoms and (quantifier := _QUANTIFIER.match(text, at)) is not None:
        group.atoms[-1] = _repeated(group.atoms[-1], *_counts(quantifier))
        return quantifier.end()
    elif character == "[":
        group.atoms.append(_Atom(1, nullable=False))
        return _after_class(text, at + 1)
    elif character == "\\":
        group.atoms.append(_Atom(1, nullable=text[at + 1 : at + 2] in ("b", "B", "A", "z", "Z")))
        return _end(_ESCAPED, text, at + 1)
    else:
        group.atoms.append(_Atom(1, nullable=character in "^$"))
    return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _counts(quantifier: re.Match[str]) -> tuple[int, int | None]:
    symbol, least, comma, most = quantifier.groups()
    if symbol:
        return int(symbol == "+"), 1 if symbol == "?" else None
    low = int(least or 0)
    return low, (int(most) if most else None) if comma else low


def _repeated(atom: _Atom, least: int, most: int | None) -> _Atom:
    if most is None and atom.bare_loop:
        raise BadExpression("an unbounded repetition is repeated without bound, as in `(a+)+`")
    size = atom.size * max(1, least + 1 if most is None else most)
    _check_expansion(size)
    return _Atom(size, nullable=atom.nullable or least == 0, bare_loop=atom.bare_loop or most is None)


def _after_class(text: str, at: int) -> int:
    """Return the end of a class, behind its `]`; classes may be nested, as in `[[:alpha:]_]`."""
    depth, first = 1, True
    if text[at : at + 1] == "^":
        at += 1
    while at < len(text) and depth:
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "[":
            depth += 1
        elif character == "]" and not first:
            depth -= 1
        first = False
        at += 1
    return at


def _check_expansion(size: int) -> None:
    if size > MAX_EXPANSION:
        raise BadExpression(f"an expression is larger than {MAX_EXPANSION} places, repetitions written out")
