"""The dashboard in a real browser: one run of dashboard.mjs, and what it found."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from http_stack import Stack, serve

KEY = "sk-operator"
TENANT = "<b onclick=alert(1)>operator</b>"
TOLERANCE = 16
"""Pixels by which a box may differ: a scroll bar, a font."""
LAYOUT = {
    "desktop": {
        "tokens-chart": (20, 614),
        "requests-chart": (646, 614),
        "ttft-chart": (20, 614),
        "itl-chart": (646, 614),
        "replicas": (20, 1240),
        "tenants": (20, 490),
        "errors": (526, 734),
        "playground": (20, 1240),
        "ask": (37, 473),
        "settings": (20, 1240),
    },
    "phone": {
        **dict.fromkeys(
            (
                *("tokens-chart", "requests-chart", "ttft-chart", "itl-chart"),
                *("replicas", "tenants", "errors", "playground", "settings"),
            ),
            (13, 364),
        ),
        "ask": (30, 330),
    },
}
"""Left edge and width of parts of the page, in pixels."""
MAX_PAINT_MS = 300
MAX_BYTES = 250_000

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the screenshots."""
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def found(demo_model: Path, packages: Path, pictures: Path) -> dict[str, Any]:
    """The findings of one run of the script."""
    node = shutil.which("node")
    assert node, "node is not installed"

    async def run(stack: Stack) -> dict[str, Any]:
        environ = {"BROWSER_HOME": str(packages.parent), "SERVER_PORT": str(stack.port), "KEY": KEY}
        script = await asyncio.create_subprocess_exec(
            node,
            Path(__file__).with_name("dashboard.mjs"),
            env=os.environ | environ | {"PICTURES": str(pictures)},
            stdout=subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(300):
                said, _ = await script.communicate()
        finally:
            if script.returncode is None:
                script.kill()
        assert script.returncode == 0
        answer: dict[str, Any] = json.loads(said)
        return answer

    async def main() -> dict[str, Any]:
        keys = pictures / "keys.toml"
        keys.write_text(f'[[keys]]\nkey = "{KEY}"\ntenant = "{TENANT}"\n')
        settings = {"api_keys_file": str(keys), "max_top_n_tokens": 5}
        async with serve(demo_model, settings=settings, echo_step_ms=10) as stack:
            return await run(stack)

    return asyncio.run(main())


async def test_it_works_behind_a_prefix_without_errors_and_without_other_hosts(found: dict[str, Any]) -> None:
    assert (found["problems"], found["foreign"]) == ([], [])
    assert found["paint"] <= MAX_PAINT_MS
    assert 100_000 < found["bytes"] <= MAX_BYTES


async def test_axe_finds_nothing(found: dict[str, Any]) -> None:
    assert found["violations"] == []


async def test_the_playground_is_used_by_keyboard_and_shows_probabilities_and_usage(found: dict[str, Any]) -> None:
    assert "80 new tokens" in found["usage"]
    assert found["chosen"]
    assert found["alternatives"] >= 1
    assert "max_tokens" in found["refusal"]
    assert "pause" in found["focus"]


async def test_hostile_texts_are_shown_as_text(found: dict[str, Any]) -> None:
    assert "<img src=x onerror=" in found["question"]
    assert "<img src=x onerror=" in found["answer"]
    assert TENANT in found["tenant"]
    assert found["broken"] == [None, 0]


async def test_the_layout_is_as_designed(found: dict[str, Any]) -> None:
    assert found["overflow"] == []
    for name, boxes in found["boxes"].items():
        for part, expected in LAYOUT[name.partition("-")[2]].items():
            assert boxes[part] == pytest.approx(expected, abs=TOLERANCE), (name, part)
