"""The dashboard in a real browser: one run of dashboard.mjs, and what it found."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from checked_echo import failing_at
from http_stack import Stack, load_tokenizer, serve, until
from pictures import image_model, picture, tokens_of
from seeing_echo import WITH_IMAGES, echo_with_images

KEY = "sk-operator"
TENANT = "<b onclick=alert(1)>operator</b>"
FAILING = " fault"
"""A prompt that fails its sequence."""
SIZE = 300, 200
"""Pixels of an image."""
TOLERANCE = 16
"""Pixels by which a box may differ: a scroll bar, a font."""
LAYOUT = {
    "desktop": {
        "tokens-chart": (20, 1240),
        "requests-chart": (20, 614),
        "responses-chart": (646, 614),
        "ttft-chart": (20, 614),
        "itl-chart": (646, 614),
        "events": (20, 490),
        "errors": (526, 734),
        "replicas": (20, 1240),
        "tenants": (20, 1240),
        "playground": (20, 1240),
        "ask": (37, 473),
        "settings": (20, 1240),
    },
    "phone": {
        **dict.fromkeys(
            (
                *("tokens-chart", "requests-chart", "responses-chart", "ttft-chart", "itl-chart"),
                *("events", "errors", "replicas", "tenants", "playground", "settings"),
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


class Acts:
    """The acts of the server that the script asks for."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._resume = threading.Event()
        self._running: asyncio.Task[int] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> int:
        """Return the status of a response."""
        async with self._stack.client.post(path, json=body, headers={"authorization": f"Bearer {KEY}"}) as response:
            await response.read()
            return response.status

    async def fail(self) -> None:
        """Lose the shard under a request; a fault of the server, and then many refused requests."""
        body: dict[str, Any] = {"inputs": "Hello", "parameters": {"max_new_tokens": 200}}
        async with asyncio.TaskGroup() as tasks:
            moved = tasks.create_task(self.post("/generate", body))
            await until(lambda: self._stack.engine.running == 1)
            self._stack.stop_shard()
        assert moved.result() == 200
        assert await self.post("/generate", body | {"inputs": FAILING}) == 424
        for number in range(60):
            assert await self.post(f"/no-such-path/{number}", {}) == 404
            assert await self.post("/generate", {"inputs": number}) == 422

    async def hang(self) -> None:
        """Let the engine hang in a step."""
        engine = self._stack.engine
        step, resume = engine.step, self._resume
        engine.step = lambda: (resume.wait(), step())[1]  # type: ignore[method-assign]
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}
        self._running = asyncio.get_running_loop().create_task(self.post("/generate", body))

    async def resume(self) -> None:
        """Let it go on."""
        self._resume.set()
        assert self._running
        assert await self._running == 200


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the screenshots."""
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def found(demo_model: Path, packages: Path, pictures: Path) -> dict[str, Any]:
    """The findings of one run of the script."""
    node = shutil.which("node")
    assert node, "node is not installed"

    async def run(stack: Stack, seeing: Stack) -> dict[str, Any]:
        acts = Acts(stack)
        environ = {"BROWSER_HOME": str(packages.parent), "SERVER_PORT": str(stack.port), "KEY": KEY}
        environ |= {"IMAGES_PORT": str(seeing.port), "PICTURE": base64.b64encode(picture(*SIZE)).decode()}
        script = await asyncio.create_subprocess_exec(
            node,
            Path(__file__).with_name("dashboard.mjs"),
            env=os.environ | environ | {"PICTURES": str(pictures)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert script.stdin
        assert script.stdout
        assert script.stderr
        try:
            async with asyncio.timeout(300):
                async for line in script.stderr:
                    act, is_act, _ = line.decode().partition(" please")
                    if is_act:
                        await getattr(acts, act)()
                        script.stdin.write(b"done\n")
                    else:
                        sys.stderr.write(act)
                said = await script.stdout.read()
                await script.wait()
        finally:
            if script.returncode is None:
                script.kill()
        assert script.returncode == 0
        answer: dict[str, Any] = json.loads(said)
        return answer

    async def main() -> dict[str, Any]:
        keys = pictures / "keys.toml"
        keys.write_text(f'[[keys]]\nkey = "{KEY}"\ntenant = "{TENANT}"\n')
        [failing] = load_tokenizer(demo_model).encode_ids(FAILING, add_special_tokens=False)
        settings = {"api_keys_file": str(keys), "max_top_n_tokens": 5}
        async with (
            serve(demo_model, settings=settings, echo_step_ms=10, build=failing_at(failing)) as stack,
            serve(image_model(pictures / "model"), limits=WITH_IMAGES, build=echo_with_images) as seeing,
        ):
            return await run(stack, seeing)

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


async def test_the_playground_sends_images_if_the_model_takes_some(found: dict[str, Any]) -> None:
    images = found["images"]
    assert images["offered"] == [False, True]
    first, second = len("[user]What is this?[answer]") + 2 * tokens_of(*SIZE), len("…[user]What is this?[answer]")
    assert images["usage"].startswith(f"{first} prompt tokens")
    assert images["shown"] == [[SIZE[0], "<b>red</b>.png"]] * 2
    assert images["kept"] == 0
    assert "image 3 cannot be read: it is no PNG" in images["refusal"]
    assert int(images["second"].split()[0].replace(",", "")) > first + second


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


async def test_a_page_that_opens_late_shows_what_happened(found: dict[str, Any]) -> None:
    assert {"started", "stopped", "back", "moved"} <= set(found["events"])
    assert found["history"] != "–"


async def test_a_flood_of_errors_hides_no_fault_and_keeps_the_height(found: dict[str, Any]) -> None:
    first = found["errors"][0]
    assert first.startswith("424")
    assert "/generate" in first
    assert found["faults"] == 1
    [unknown] = found["unknown"]
    assert "no-such-path/59" in unknown
    assert found["sorted"] == "Times"
    assert found["errorsHeight"] < 450


async def test_the_health_of_a_replica_that_hangs_is_in_the_line_the_title_and_the_icon(found: dict[str, Any]) -> None:
    line, title, icon = found["sick"]
    assert line.startswith("Not healthy · 0 of 1 replicas · 1 hung")
    assert title.startswith("⚠ Not healthy")
    assert icon == "dashboard/icon-bad.svg"


async def test_a_page_whose_charts_cannot_be_drawn_still_works(found: dict[str, Any]) -> None:
    assert "cannot be drawn" in found["bare"]


async def test_a_page_without_a_connection_says_so_and_finds_the_server_again(found: dict[str, Any]) -> None:
    line, connection, title = found["stale"]
    assert line.startswith("No connection · figures of ")
    assert connection == "lost"
    assert title.startswith("…")
    assert found["again"] < 8000
