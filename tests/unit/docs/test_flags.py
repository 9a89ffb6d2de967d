"""docs/flags.md matches the settings."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_flags_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "generate_docs.py"))["flags_page"]()
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == page, "run: make docs"
