"""The page of text-generation-benchmark in a real browser, at the width of a phone and of a desktop."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from text_generation_bench.load.client import ClientReport, RequestTimes
from text_generation_bench.load.measures import level_result
from text_generation_bench.load.report import report_page
from text_generation_bench.load.settings import parse_settings
from text_generation_bench.load.workload import Level

HERE = Path(__file__).parent
PLOTS = ["Throughput against time to first token", "Throughput against time between tokens", "Goodput", "Time to first token",
         "Time between tokens (events)", "Duration of a request", "Tokens per second over time"]  # fmt: skip


def content(seed: int) -> dict[str, Any]:
    """Return the content of a result file with four levels."""
    draw, levels = random.Random(seed), []
    for number, open_ in enumerate((1, 8, 32, 64)):
        requests = [
            RequestTimes(
                at,
                0.0,
                0.01 * open_ * draw.uniform(0.5, 2),
                2.0,
                21,
                21,
                [0.02 * draw.uniform(0.5, 2) for _ in range(20)],
            )
            for at in range(40)
        ]
        requests[-1].error = "503: Model is overloaded"
        report = ClientReport(requests, dict.fromkeys(range(9), open_ * 40), 0.2, [0.001], 0.0, 40 / open_)
        levels.append(level_result(Level(number, str(open_), open_, is_open_loop=False), [report], {"ttft": 0.3}))
    settings = parse_settings(["--seed", "1"]).public() | {"model": "meta-llama/Llama-3.1-8B-Instruct"}
    environment = {"client": "0", "python": "3", "cores": 2, "system": "Linux"}
    return {"settings": settings, "server": {}, "environment": environment, "targets": {"ttft": 0.3}, "interrupted": False,
            "time": "2026-11-22", "levels": levels}  # fmt: skip


def open_page(packages: Path, page: str, width: int, scheme: str, folder: Path) -> dict[str, Any]:
    """Return what a browser found."""
    (folder / "page.html").write_text(page, encoding="utf-8")
    scratch = packages.parent / "run"  # the browser is unpacked there
    scratch.mkdir(exist_ok=True)
    command = ["node", HERE / "report.mjs", packages, folder / "page.html", str(width), scheme, folder / "page.png"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"TMPDIR": str(scratch)}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("width", "scheme", "runs"), [(360, "light", 1), (360, "dark", 2), (1280, "dark", 1), (1280, "light", 2)]
)
def test_the_report_is_readable_and_loads_nothing(
    width: int, scheme: str, runs: int, packages: Path, tmp_path: Path
) -> None:
    page = report_page([(f"run {seed}" if runs > 1 else "", content(seed)) for seed in range(runs)])
    found = open_page(packages, page, width, scheme, tmp_path)
    assert found["errors"] == []
    assert found["requests"] == [f"file://{tmp_path}/page.html"]
    assert found["violations"] == []
    assert found["titles"] == PLOTS
    assert len(found["colours"]) == len(PLOTS)
    assert min(found["colours"]) > 3, "each plot has axes and lines"
    assert found["pageWidth"] == width, "only tables scroll sideways"
    assert found["smallest"] >= 12
    assert found["background"] == ("rgb(16, 20, 24)" if scheme == "dark" else "rgb(255, 255, 255)")
