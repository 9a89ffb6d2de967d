"""Requests that schemathesis makes from the OpenAPI document: no 5xx, no undocumented answer, no valid one refused.

The document that it gets has every rule of validation: those of the server's own are for readers and generators.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from stack import running
from strict_document import strict
from tokenizers import Tokenizer

from text_generation_router.api.core.settings import Limits

pytestmark = [pytest.mark.system, pytest.mark.full, pytest.mark.timeout(1500)]

SECONDS = int(os.environ.get("SCHEMATHESIS_SECONDS", "600"))
ENVIRONMENT = Path(__file__).parents[2] / ".cache" / "clients" / "schemathesis"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "positive_data_acceptance",
)

CUT = "ST109"
"""Invalid JSON: schemathesis reads one megabyte of a response, and 97 answers with log-probabilities are twenty."""
UNTESTED = "POST /invocations"
"""An operation whose body is one of three that others have: together they have too many branches for schemathesis."""
REFUSED = "ST202"
"""A valid request that was refused. One reason is in no document: the model cannot write a character of the schema."""
NO_TOKENS = "the model has no tokens for a character of it"


def installed() -> Path:
    """Return the command, in an environment of its own. Skip the test where it cannot be installed."""
    command = ENVIRONMENT / "bin" / "schemathesis"
    if not command.is_file():
        for step in (
            [sys.executable, "-m", "venv", ENVIRONMENT],
            [ENVIRONMENT / "bin" / "pip", "install", "--disable-pip-version-check", "schemathesis==4.32.5"],
        ):
            done = subprocess.run(step, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                pytest.skip(f"schemathesis cannot be installed: {done.stderr[-500:]}")
    return command


def strict_document_of(url: str, model: Path) -> dict[str, Any]:
    """Return the document of a server with the rules that its settings and its tokenizer give."""

    def get(path: str) -> dict[str, Any]:
        with urllib.request.urlopen(url + path) as answer:
            value: dict[str, Any] = json.load(answer)
            return value

    info = get("/info")
    limits = Limits(
        max_best_of=info["max_best_of"],
        max_stop_sequences=info["max_stop_sequences"],
        max_top_n_tokens=5,
        max_input_tokens=info["max_input_tokens"],
        max_total_tokens=info["max_total_tokens"],
        vocab_size=Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size(),
    )
    return strict(get("/openapi.json"), limits, generations=info["max_concurrent_requests"])


def test_every_operation_keeps_the_document(demo_model: Path, tmp_path: Path) -> None:
    document = tmp_path / "openapi.json"
    with running(demo_model, "--max-total-tokens", "4096") as stack:
        document.write_text(json.dumps(strict_document_of(stack.url, demo_model)))
        done = subprocess.run(
            [
                *(installed(), "--no-color", "run", document, "--url", stack.url, "--continue-on-failure"),
                *("--phases", "fuzzing", "--max-time", str(SECONDS), "--workers", "2"),
                *("--checks", ",".join(CHECKS), "--request-timeout", "60"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS + 300,
            check=False,
        )
    assert "Test cases:" in done.stdout, done.stdout + done.stderr
    assert set(re.findall(r"_ (\S+ \S+) _+\nSchema Error", done.stdout)) <= {UNTESTED}, done.stdout[-20_000:]
    assert set(re.findall(r"❌ (ST\d+)", done.stdout)) <= {CUT, REFUSED}, done.stdout[-20_000:]
    refusals = re.findall(rf"- {REFUSED} .*?`(.*?)`\n\nReproduce", done.stdout, re.DOTALL)
    assert all(NO_TOKENS in refusal for refusal in refusals), refusals
    assert len(refusals) == done.stdout.count(f"- {REFUSED} ")
