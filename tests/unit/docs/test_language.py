"""The rules of CONTRIBUTING.md for names, docstrings and file sizes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PRODUCT = ("proto", "router", "shard", "launcher", "bench", "scripts")
MODULES = [
    path
    for folder in (*PRODUCT, "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name and "node_modules" not in path.parts
]
MAX_LINES = 400
OPENINGS = re.compile(r"(What|Whether|Whoever|Who|Whose|How|Where|When|Why|Which|Of|Those|These|Nobody)\b")
"""First words of docstrings that are no declarative sentence."""
WORDS = re.compile(r"\b(nobody|whoever|hangs? on|newcomers?|in vain|foreseen|the building)\b", re.IGNORECASE)
"""Words with a plainer term in docs/glossary.md."""


Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def definitions(path: Path) -> list[Definition]:
    """The module in a file, and its classes and functions at any depth."""
    found: list[Definition] = []
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Definition):
            found.append(node)
        statements = ast.stmt | ast.ExceptHandler | ast.match_case  # expressions, most of the nodes, have none
        waiting += (each for each in ast.iter_child_nodes(node) if isinstance(each, statements))
    return found


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and attributes, with their lines."""
    for node in definitions(path):
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


def offences(paths: Iterable[Path], pattern: re.Pattern[str]) -> list[str]:
    """Return the lines that `pattern` is found in, with their places."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_a_module_has_at_most_400_lines() -> None:
    assert len(MODULES) > 300
    assert [str(path) for path in MODULES if len(path.read_text(encoding="utf-8").splitlines()) > MAX_LINES] == []


def test_a_docstring_opens_with_a_declarative_sentence() -> None:
    opened = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in MODULES
        for line, text in docstrings(path)
        if OPENINGS.match(text)
    ]
    assert opened == []


def test_modules_and_documents_use_plain_words() -> None:
    assert offences([*MODULES, *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], WORDS) == []


def test_a_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] in PRODUCT:
            for node in definitions(path):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
