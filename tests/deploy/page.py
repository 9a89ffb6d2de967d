"""The commands of a page of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def commands(page: str, heading: str) -> list[str]:
    """Return the commands below a heading of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    section = re.search(rf"^## {heading}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    blocks = "".join(re.findall(r"^```console\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL))
    return [line.removeprefix("$ ") for line in blocks.replace("\\\n", "").splitlines()]
