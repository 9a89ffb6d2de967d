"""The charting library in the router is an exact copy of its package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.parametrize(
    ("copy", "original"),
    [
        ("uPlot.iife.min.js", "dist/uPlot.iife.min.js"),
        ("uPlot.min.css", "dist/uPlot.min.css"),
        ("uPlot.LICENSE", "LICENSE"),
    ],
)
def test_a_file_equals_the_file_of_the_package(copy: str, original: str, packages: Path) -> None:
    here = files("text_generation_router") / "dashboard" / "static" / copy
    assert here.read_bytes() == (packages / "uplot" / original).read_bytes(), "run: make uplot"
