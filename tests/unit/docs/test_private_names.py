"""Private names of other libraries: none is used but those listed here, each with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILES = [
    path
    for folder in ("proto", "router", "shard", "launcher", "bench", "scripts", "deploy")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]
REASONS = {
    "_lib": "the types of llguidance, for mypy only",
    "_check_health": "TensorRT-LLM < 1.3 tells its health nowhere else",
    "_supports_sdpa": "transformers says nowhere else which attention a model can use",
    "_attn_implementation": "the name of a model's attention function; transformers sets it by a public argument at loading only",
    "_from_config": "a model class with random weights: the public way of transformers chooses another class",
    "_symmetric_memory": "torch has no public module for symmetric memory",
    "_scaled_mm": "the FP8 product of torch 2.9 has no public name",
    "_reorder_linear_weight": "oneDNN's weights in its own order; torch's public product reorders them at every call",
    "_linear_pointwise": "the same",
    "_is_mkldnn_bf16_supported": "torch has no public name for it",
    "_is_mkldnn_fp16_supported": "the same",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that our own code defines, as variables, functions, classes and attributes of `self`."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def used(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Private names after a dot, in imports and in `getattr` and its like."""
    for node in nodes:
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.Import(names=aliases):
                yield from (part for alias in aliases for part in alias.name.split("."))
            case ast.ImportFrom(module=str(module), names=aliases):
                yield from (*module.split("."), *(alias.name for alias in aliases))
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                yield name


def test_private_names_of_other_libraries_are_listed_with_a_reason() -> None:
    nodes = {path: [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))] for path in FILES}
    own = {name for each in nodes.values() for name in defined(each)}
    found = {(path.name, name) for path, each in nodes.items() for name in used(each) if is_private(name)}
    foreign = {(file, name) for file, name in found if name not in own}
    assert sorted((file, name) for file, name in foreign if name not in REASONS) == []
    assert sorted(REASONS.keys() - {name for _, name in foreign}) == [], "listed, but not used"
