"""Requests that schemathesis makes from the OpenAPI document: no 5xx, and no answer that the document does not describe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from client_environments import Environment
from stack import running

pytestmark = [pytest.mark.system, pytest.mark.full, pytest.mark.timeout(1500)]

SECONDS = int(os.environ.get("SCHEMATHESIS_SECONDS", "600"))
SEED = os.environ.get("SCHEMATHESIS_SEED")
SCHEMATHESIS = Environment("schemathesis", ["schemathesis==4.32.5"])
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


def describe_events(document: dict[str, Any]) -> None:
    """Let the schema of a stream be that of one event: schemathesis reads one at a time."""
    for operation in (operation for methods in document["paths"].values() for operation in methods.values()):
        content = operation["responses"]["200"].get("content", {})
        if (media := content.get("text/event-stream")) is not None:
            data = {"type": "string", "contentMediaType": "application/json", **media["schema"]}
            event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
            media["schema"] = event


def test_every_operation_keeps_the_document(demo_model: Path, tmp_path: Path) -> None:
    document = tmp_path / "openapi.json"
    with running(demo_model, "--max-total-tokens", "4096", grammars=True) as stack:
        with urllib.request.urlopen(f"{stack.url}/openapi.json") as answer:
            described = json.load(answer)
        describe_events(described)
        document.write_text(json.dumps(described))
        done = subprocess.run(
            [
                *(
                    SCHEMATHESIS.installed() / "schemathesis",
                    "--no-color",
                    "run",
                    document,
                    "--url",
                    stack.url,
                    "--continue-on-failure",
                ),
                *("--phases", "fuzzing", "--max-time", str(SECONDS), "--workers", "2"),
                *("--checks", ",".join(CHECKS), "--request-timeout", "60"),
                *(("--seed", SEED) if SEED else ()),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS + 300,
            check=False,
        )
    assert "Traceback" not in str(stack.records)
    assert "Test cases:" in done.stdout, done.stdout + done.stderr
    assert set(re.findall(r"_ (\S+ \S+) _+\nSchema Error", done.stdout)) <= {UNTESTED}, done.stdout[-20_000:]
    assert set(re.findall(r"❌ (ST\d+)", done.stdout)) <= {CUT}, done.stdout[-20_000:]
