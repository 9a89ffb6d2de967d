"""Requests that schemathesis makes from the OpenAPI document: no 5xx, and no answer that the document does not describe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from event_schemas import describe_events
from stack import running

pytestmark = [pytest.mark.system, pytest.mark.full, pytest.mark.timeout(1500)]

SECONDS = int(os.environ.get("SCHEMATHESIS_SECONDS", "600"))
ENVIRONMENT = Path(__file__).parents[2] / ".cache" / "clients" / "schemathesis"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)

CUT = "ST109"
"""Invalid JSON: schemathesis reads one megabyte of a response, and 97 answers with log-probabilities are twenty."""
UNTESTED = "POST /invocations"
"""An operation whose body is one of three that others have: together they have too many branches for schemathesis."""


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


def test_every_operation_keeps_the_document(demo_model: Path, tmp_path: Path) -> None:
    document = tmp_path / "openapi.json"
    with running(demo_model, "--max-total-tokens", "4096") as stack:
        with urllib.request.urlopen(f"{stack.url}/openapi.json") as answer:
            described = json.load(answer)
        describe_events(described)
        document.write_text(json.dumps(described))
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
    assert set(re.findall(r"❌ (ST\d+)", done.stdout)) <= {CUT}, done.stdout[-20_000:]
