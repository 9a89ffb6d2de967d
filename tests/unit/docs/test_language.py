"""The rules of CONTRIBUTING.md for names, docstrings and file sizes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and attributes, with their lines."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_its_docstrings_are_declarative(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES
    assert [(line, doc[:60]) for line, doc in docstrings(ast.parse(text)) if OPENINGS.match(doc)] == []
    if path != Path(__file__):
        assert [(number, line.strip()) for number, line in enumerate(lines, 1) if WORDS.search(line)] == []


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name
)
def test_a_document_uses_plain_words(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [(number, line) for number, line in enumerate(lines, 1) if WORDS.search(line)] == []


def test_a_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] in PRODUCT:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
