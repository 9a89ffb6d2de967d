"""One launcher with the demo model for all client tests. Greedy float32 answers are equal on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client_server import MAX_CONCURRENT, Server
from openai import OpenAI
from stack import running
from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def server(demo_model: Path) -> Iterator[Server]:
    """Start the launcher with the torch engine and limits small enough for tests to reach."""
    limits = ("--max-total-tokens", "1024", "--max-batch-total-tokens", "8192", "--max-batch-prefill-tokens", "256")
    places = ("--max-concurrent-requests", str(MAX_CONCURRENT))
    with running(demo_model, "--dtype", "float32", *limits, *places, engine="torch") as stack:
        tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
        yield Server(stack.url, str(demo_model), tokenizer)


@pytest.fixture
def openai_client(server: Server) -> Iterator[OpenAI]:
    """A client without retries, so that errors reach the test."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client
