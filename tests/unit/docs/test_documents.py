"""README and docs/: their links and their examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from shard_process import shard

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_to_files(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_headings_lead_to_headings(document: Path) -> None:
    for file, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", document.read_text(encoding="utf-8")):
        headings = re.findall(
            r"^#+ (.*)$", ((document.parent / file) if file else document).read_text("utf-8"), re.MULTILINE
        )
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{file}#{anchor}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


async def test_the_example_client_of_a_shard(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```\n\nIt prints `(.*?)`", text, re.DOTALL)
    assert example is not None
    address = f"unix://{tmp_path}/shard"
    async with shard(address):
        code = example[1].replace("unix:///tmp/shard", address)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == example[2]
