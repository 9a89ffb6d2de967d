"""The product wheel contains the product packages only."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_wheel_has_the_product_packages_and_not_the_benchmarks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    names = {"proto", "router", "shard", "launcher"}
    assert set(packages) == {f"{name}/text_generation_{name}" for name in names}
