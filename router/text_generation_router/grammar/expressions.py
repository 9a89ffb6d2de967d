"""What a regular expression may look like before an engine sees it. One pass over the text, no backtracking.

The engine here is an automaton and would bear `(a+)+`; the texts that satisfy a schema are validated by clients whose
engines backtrack, and would not. The scan is not a parser: a malformed expression passes, and the engine names its fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_EXPRESSION = 4096
"""Characters of one expression."""
MAX_EXPANSION = 20_000
"""Places in the expression with its counted repetitions written out."""
_MAX_GROUPS = 64
_MAX_COUNT_DIGITS = 7
_ZERO_WIDTH_ESCAPES = "bBAzZ"


class BadExpression(ValueError):
    """An expression that is refused; `str()` says why."""


@dataclass(slots=True)
class _Atom:
    """One piece of a sequence, with its repetition."""

    size: int
    nullable: bool
    bare_loop: bool = False
    """Can be nothing but an unbounded repetition: repeated without bound again, it is ambiguous."""


@dataclass(slots=True)
class _Group:
    """An open group: its finished alternatives summed up, and the atoms of the one being read."""

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
    """Refuse what is too long, too large or repeats a repetition. Raises BadExpression."""
    if len(expression) > MAX_EXPRESSION:
        raise BadExpression(f"an expression is longer than {MAX_EXPRESSION} characters")
    groups = [_Group()]
    position = 0
    while position < len(expression):
        position = _step(expression, position, groups)
        if len(groups) > _MAX_GROUPS:
            raise BadExpression(f"an expression has groups more than {_MAX_GROUPS} levels deep")
    while len(groups) > 1:
        inner = groups.pop().as_atom()
        groups[-1].atoms.append(inner)
    if groups[0].as_atom().size > MAX_EXPANSION:
        raise _too_large()


def without_anchors(expression: str) -> str:
    """Without the `^` in front and the `$` at the end: an expression here is always one for the whole text."""
    body = expression.removeprefix("^")
    if body.endswith("$"):
        escapes = len(body[:-1]) - len(body[:-1].rstrip("\\"))
        if escapes % 2 == 0:
            body = body[:-1]
    return body


def _step(text: str, at: int, groups: list[_Group]) -> int:
    """Read one piece at `at`; where the next one begins."""
    group, character = groups[-1], text[at]
    if character == "(":
        groups.append(_Group())
        return _after_group_head(text, at + 1)
    if character == ")" and len(groups) > 1:
        groups.pop()
        groups[-1].atoms.append(group.as_atom())
    elif character == "|":
        group.end_alternative()
    elif character in "*+?{" and group.atoms and (repetition := _repetition(text, at)) is not None:
        least, most, after = repetition
        group.atoms[-1] = _repeated(group.atoms[-1], least, most)
        return after + 1 if text[after : after + 1] == "?" else after  # `*?`: lazy
    elif character == "[":
        group.atoms.append(_Atom(1, nullable=False))
        return _after_class(text, at + 1)
    elif character == "\\":
        group.atoms.append(_Atom(1, nullable=text[at + 1 : at + 2] in tuple(_ZERO_WIDTH_ESCAPES)))
        return _after_escape(text, at + 1)
    else:
        group.atoms.append(_Atom(1, nullable=character in "^$"))
    return at + 1


def _repeated(atom: _Atom, least: int, most: int | None) -> _Atom:
    if most is None and atom.bare_loop:
        raise BadExpression("an unbounded repetition is repeated without bound, as in `(a+)+`")
    size = atom.size * max(1, least + 1 if most is None else most)
    if size > MAX_EXPANSION:
        raise _too_large()
    return _Atom(size, nullable=atom.nullable or least == 0, bare_loop=atom.bare_loop or most is None)


def _repetition(text: str, at: int) -> tuple[int, int | None, int] | None:
    """(least, most, where it ends) of the quantifier at `at`; None where `{` is just a character."""
    simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(text[at])
    if simple is not None:
        return simple[0], simple[1], at + 1
    end = text.find("}", at, at + 2 * _MAX_COUNT_DIGITS + 3)
    least, comma, most = text[at + 1 : end].partition(",") if end > 0 else ("", "", "")
    if not (least or most) or not (least + most).isdecimal():
        return None
    low = int(least or 0)
    if not comma:
        return low, low, end + 1
    return low, int(most) if most else None, end + 1


def _after_group_head(text: str, at: int) -> int:
    """Behind `?:`, `?P<name>`, `?i:` and the like."""
    if text[at : at + 1] != "?":
        return at
    for end in range(at + 1, min(at + 64, len(text))):
        if text[end] in ":>=!":
            return end + 1
        if text[end] == ")":
            return end
    return at + 1


def _after_class(text: str, at: int) -> int:
    """Behind the `]` that ends a class; classes may hold classes, as in `[[:alpha:]_]`."""
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


def _after_escape(text: str, at: int) -> int:
    """Behind the letter of an escape, and behind the braces of `\\p{…}`, `\\u{…}` and `\\x{…}`."""
    if text[at : at + 1] in ("p", "P", "u", "x") and text[at + 1 : at + 2] == "{":
        end = text.find("}", at, at + 64)
        return end + 1 if end > 0 else at + 1
    return at + 1


def _too_large() -> BadExpression:
    return BadExpression(f"an expression is larger than {MAX_EXPANSION} places, repetitions written out")
