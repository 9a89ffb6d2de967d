"""The script of `make run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_demo.py"


def test_make_run_says_how_to_call_the_server(echo_model: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, str(SCRIPT), "--model-id", str(echo_model), "--engine", "echo"]
    with subprocess.Popen(
        [*command, "--hostname", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        try:
            assert any(f"curl {url}/generate" in line for line in demo.stdout)
        finally:
            demo.terminate()
        assert demo.wait(60) == 0
