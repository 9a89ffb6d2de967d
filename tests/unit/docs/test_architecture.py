"""docs/architecture.md against the code: the files and symbols it names, and the tables of "How to add"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from text_generation_proto.values import LOGPROB_PARAMETERS, SAMPLING_PARAMETERS, STOPPING_PARAMETERS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = {
    "C/": "proto/text_generation_common/",
    "P/": "proto/text_generation_proto/",
    "R/": "router/text_generation_router/",
    "S/": "shard/text_generation_shard/",
    "launcher/": "launcher/",
}
MAX_FILES = {
    "a request parameter of one dialect": 5,
    "a request parameter of all dialects": 7,
    "a router flag that the scheduler uses": 3,
    "a router flag that HTTP uses": 3,
    "a shard flag": 3,
    "an error": 2,
    "a metric of the scheduler": 2,
    "a metric of requests": 2,
    "a route": 2,
    "a tool-call format": 3,
    "a model family": 1,
    "a model family with a new structure": 3,
}
SECTION = TEXT.partition("## Where is …")[2].partition("\n## ")[0]
PLACES = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")][1:]
ROWS = re.findall(r"^\| (an? [^|]+) \| `(\w+)` \| ([^|]+) \|$", TEXT, re.MULTILINE)


def path_of(name: str) -> Path:
    prefix, folder = next((prefix, folder) for prefix, folder in PACKAGES.items() if name.startswith(prefix))
    return ROOT / folder / name.removeprefix(prefix)


def named_in(text: str) -> list[Path]:
    return [path_of(name) for name in re.findall(r"(?<![\w/.])((?:[CPRS]|launcher)/[\w/.]+\.(?:py|proto))", text)]


def defines(path: Path, symbol: str) -> bool:
    """Return True if the file defines a function, class or constant; a method is `Class.method`."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    *classes, name = symbol.split(".")
    for each in classes:
        body = [inner for node in body if isinstance(node, ast.ClassDef) and node.name == each for inner in node.body]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    assigned += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return name in {node.name for node in body if isinstance(node, functions)} | {
        ast.unparse(each) for each in assigned
    }


def product_files_with(word: str) -> set[Path]:
    sources = [path for folder in ("proto", "router", "shard") for path in (ROOT / folder).rglob("*.p*")]
    return {
        path
        for path in sources
        if path.suffix in (".py", ".proto")
        and "_pb2" not in path.name
        and re.search(rf"\b{word}\b", path.read_text(encoding="utf-8"))
    }


def test_every_file_it_names_exists() -> None:
    named = named_in(TEXT)
    assert len(named) > 30
    assert [str(path) for path in named if not path.is_file()] == []


def test_each_place_defines_the_symbol_of_its_row() -> None:
    assert len(PLACES) > 70
    names = [(path_of(file.strip("`")), symbol.strip("`")) for _, file, symbol in PLACES]
    assert [(str(path), symbol) for path, symbol in names if not defines(path, symbol)] == []


def test_it_has_a_row_for_every_kind_of_addition() -> None:
    assert {kind for kind, _, _ in ROWS} == MAX_FILES.keys()


@pytest.mark.parametrize(("kind", "example", "files"), ROWS, ids=[example for _, example, _ in ROWS])
def test_an_example_touches_the_files_of_its_row(kind: str, example: str, files: str) -> None:
    listed = named_in(files)
    if files.startswith("the same"):
        first = next(row for row in ROWS if row[0] == "a request parameter of one dialect")
        listed += named_in(first[2])
    assert product_files_with(example) == set(listed)
    assert len(listed) <= MAX_FILES[kind]


@pytest.mark.parametrize("parts", [("engines/torch", "step", "grammar.py"), ("engines/tensorrt_llm",)], ids="-".join)
def test_an_engine_implements_each_parameter_or_names_it_as_unsupported(parts: tuple[str, ...]) -> None:
    shard = ROOT / "shard" / "text_generation_shard"
    files = [
        file for part in parts for file in ((shard / part).rglob("*.py") if (shard / part).is_dir() else [shard / part])
    ]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = {one.field for one in (*SAMPLING_PARAMETERS, *STOPPING_PARAMETERS, *LOGPROB_PARAMETERS)}
    assert {name for name in names if not re.search(rf"\b{name}\b", source)} == set()
