"""JavaScript clients, each a script in js/ that prints the number of its failed checks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from client_environments import CACHE, run
from client_server import PROMPT, Server
from full_grid import full

pytestmark = [
    pytest.mark.system,
    pytest.mark.model,
    pytest.mark.skipif(shutil.which("npm") is None, reason="node and npm are not installed: `make test` says so too"),
]

SCRIPTS = Path(__file__).parent / "js"


@pytest.mark.parametrize("name", ["openai", "huggingface", "anthropic", full("ai")])
def test_script(name: str, server: Server) -> None:
    """The packages are in NODE_HOME, or in .cache/node as made by `make test`."""
    home = Path(os.environ.get("NODE_HOME", CACHE / "node"))
    assert (home / "node_modules").is_dir(), f"there are no packages in {home}: run `make node-packages`"
    asked = {"SERVER_URL": server.url, "MODEL_ID": server.model, "PROMPT_TOKENS": str(server.count(PROMPT))}
    said = run("node", SCRIPTS / f"{name}.mjs", NODE_HOME=str(home), **asked)
    assert said.endswith(" passed, 0 failed\n")
