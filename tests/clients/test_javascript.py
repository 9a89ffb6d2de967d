"""JavaScript clients, each a script in js/ that prints the number of its failed checks."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest
from client_server import PROMPT, Server

pytestmark = [
    pytest.mark.system,
    pytest.mark.model,
    pytest.mark.skipif(shutil.which("npm") is None, reason="node and npm are not installed: `make test` says so too"),
]

SCRIPTS = Path(__file__).parent / "js"
NAMES = ("openai", "huggingface", "anthropic")


@pytest.fixture(scope="module")
def node_home() -> Path:
    """Folder of the installed packages: NODE_HOME, or .cache/node as made by `make test`."""
    default = Path(__file__).parents[2] / ".cache" / "node"
    folder = Path(os.environ.get("NODE_HOME", default))
    if not (folder / "node_modules").is_dir():
        pytest.fail(f"there are no packages in {folder}: run `make node-packages`")
    return folder


@pytest.fixture(scope="module")
def reports(server: Server, node_home: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of each script but the longest."""
    return run_scripts(server, node_home, *NAMES)


def run_scripts(server: Server, node_home: Path, *names: str) -> dict[str, tuple[int, str]]:
    """Run scripts concurrently; return the exit code and output of each."""
    node = shutil.which("node")
    assert node, "node is not installed"
    environ = os.environ | {
        "NODE_HOME": str(node_home),
        "SERVER_URL": server.url,
        "MODEL_ID": server.model,
        "PROMPT_TOKENS": str(server.count(PROMPT)),
    }
    with ExitStack() as running:
        scripts = {
            name: running.enter_context(
                subprocess.Popen(
                    [node, SCRIPTS / f"{name}.mjs"], env=environ, stdout=PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
            for name in names
        }
        for script in scripts.values():
            running.callback(script.kill)
        said = {name: script.communicate(timeout=300)[0] for name, script in scripts.items()}
        return {name: (script.returncode, said[name]) for name, script in scripts.items()}


def check(report: tuple[int, str]) -> None:
    """Assert that no check of a script failed."""
    code, said = report
    assert code == 0, said
    assert said.endswith(" passed, 0 failed\n")


@pytest.mark.parametrize("name", NAMES)
def test_script(name: str, reports: dict[str, tuple[int, str]]) -> None:
    check(reports[name])


@pytest.mark.full
def test_ai_sdk(server: Server, node_home: Path) -> None:
    check(run_scripts(server, node_home, "ai")["ai"])
