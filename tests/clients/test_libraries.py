"""Client libraries, each in an environment of its own, which runs a script in libraries/ against one server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client_environments import Environment, run
from client_server import ANSWER, PROMPT, QUESTION
from stack import running

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.full]

SCRIPTS = Path(__file__).parent / "libraries"
LIBRARIES = [
    Environment("dspy", ["dspy==3.4.1"]),
    Environment("guidance", ["guidance==0.3.1", "openai==3.54.0"]),
    Environment("haystack", ["haystack-ai==3.4.0", "huggingface-api-haystack==3.1.0"]),
    Environment("instructor", ["instructor[anthropic]==1.17.0"]),
    Environment(
        "langchain",
        ["langchain-openai==1.7.3", "langchain-anthropic==1.7.7", "langchain-huggingface==1.2.3"],
    ),
    Environment("litellm", ["litellm==1.106.2", "mcp==2.3.0"]),  # imports `mcp`, which it does not declare
    Environment("llama_index", ["llama-index-llms-openai-like==0.8.1"]),
    Environment("llama_index_tgi", ["llama-index-llms-text-generation-inference==0.3.3"]),
    Environment("openai_agents", ["openai-agents==0.24.0"]),
    Environment("outlines", ["outlines[openai]==1.3.3", "huggingface-hub==2.4.0"]),
    Environment("pydantic_ai", ["pydantic-ai-slim[openai,huggingface]==2.68.0"]),
    Environment("smolagents", ["smolagents[openai]==1.26.0"]),
]
QUIET = {"HAYSTACK_TELEMETRY_ENABLED": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Settings that keep the libraries from calling other hosts."""


@pytest.fixture(scope="module")
def url(demo_model: Path) -> Iterator[str]:
    """The URL of the server."""
    with running(demo_model, "--dtype", "float32", "--max-total-tokens", "2048", engine="torch") as stack:
        yield stack.url


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_library(library: Environment, request: pytest.FixtureRequest) -> None:
    python = Environment(library.name, [*library.pins, "pytest==9.2.0"]).installed() / "python"
    asked = {"SERVER_URL": request.getfixturevalue("url"), "QUESTION": QUESTION, "ANSWER": ANSWER, "PROMPT": PROMPT}
    run(python, "-m", "pytest", "-q", SCRIPTS / f"{library.name}_checks.py", **asked, **QUIET)
