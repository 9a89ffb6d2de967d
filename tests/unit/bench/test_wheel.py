"""The product wheel contains the product packages and the command text-generation-benchmark."""

from __future__ import annotations

import ast
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[3]
LOAD = ROOT / "bench" / "text_generation_bench" / "load"


def test_wheel_has_the_product_packages_and_of_the_benchmarks_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    names = {"proto", "router", "shard", "launcher"}
    packages = {f"{name}/text_generation_{name}" for name in names} | {"proto/text_generation_common"}
    assert set(wheel["only-include"]) == packages | {
        "bench/text_generation_bench/__init__.py",
        "bench/text_generation_bench/load",
    }
    assert set(wheel["sources"]) == names | {"bench"}
    for target in project["project"]["scripts"].values():
        assert find_spec(target.partition(":")[0]) is not None


def test_the_command_imports_no_other_benchmark() -> None:
    imported = {
        node.module
        for path in LOAD.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("text_generation_bench")
    }
    assert len(imported) > 5
    assert {name for name in imported if not name.startswith("text_generation_bench.load.")} == set()
