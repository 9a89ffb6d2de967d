"""The recipes of docs/tensorrt-llm.md in empty environments, with the stand-in's wheel in place of tensorrt_llm: a grammar is served.

The wheel pins what the real one pins: llguidance.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from stack import Stack
from standin import VERSIONS, build_wheel

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
SCHEMA = {"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]}
BODY = {
    "messages": [{"role": "user", "content": "Well?"}],
    "max_tokens": 40,
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
}


def pip(python: Path, *arguments: str) -> str:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("recipe", ["into the image", "into the environment of the server"])
def test_a_grammar_is_served(tmp_path: Path, version: str, recipe: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    packages = [str(build_wheel(version, tmp_path)), str(ROOT)]
    for package in packages if recipe == "into the image" else reversed(packages):
        pip(python, "install", "--quiet", package)
    assert "No broken requirements" in pip(python, "check")
    assert "Version: 0.7.29" in pip(python, "show", "llguidance")
    stack = Stack(MODEL, engine="tensorrt-llm", python=python)
    try:
        stack.wait_for("ready")
        request = urllib.request.Request(
            stack.url + "/v1/chat/completions", json.dumps(BODY).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
        assert isinstance(json.loads(answer)["done"], bool)
    finally:
        stack.close()
