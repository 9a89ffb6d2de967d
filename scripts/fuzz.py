"""Fuzz the server for some minutes: half with requests that schemathesis makes from its OpenAPI document, half with the
property tests under other seeds.

Usage: python scripts/fuzz.py MODEL MINUTES SCHEMATHESIS [SEED]

Fails if a response is a 5xx or is not as documented, if the log has a traceback, or if a property does not hold. A failure is
printed with the seed, the curl command or the example that reproduces it: add it to the tests as an @example, and a message
between router and shard to tests/corpus, whose findings are tried first.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
START_TIMEOUT_S = 60.0


def fuzz_http(model: str, seconds: float, schemathesis: str, seed: int) -> bool:
    """Fuzz a server with the echo engine. Return True if nothing was found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    launcher = Path(sys.executable).with_name("text-generation-launcher")
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [
                *(launcher, "--model-id", model, "--engine", "echo", "--hostname", "127.0.0.1", "--port", str(port)),
                *("--echo-step-ms", "1", "--max-input-tokens", "512", "--max-total-tokens", "1024"),
            ],
            stderr=log,
        )
        try:
            wait_until_healthy(url)
            with urllib.request.urlopen(f"{url}/openapi.json") as answer:
                described = json.load(answer)
            runpy.run_path(str(SUPPORT / "event_schemas.py"))["describe_events"](described)
            Path(folder, "openapi.json").write_text(json.dumps(described))
            run = [schemathesis, "run", f"{folder}/openapi.json", "--url", url, "--checks", CHECKS]
            run += ["--phases", "coverage,fuzzing"]
            run += ["--max-time", str(int(seconds)), "--seed", str(seed), "--suppress-health-check", "all"]
            found = subprocess.run([*run, "--continue-on-failure", "--warnings", "off"], check=False).returncode != 0
        finally:
            server.terminate()
            server.wait()
        log.seek(0)
        text = log.read()
    if "Traceback" in text:
        sys.stdout.write(text[text.index("Traceback") :][:10_000])
        found = True
    return not found


def wait_until_healthy(url: str) -> None:
    """Return once the server answers. Raises TimeoutError."""
    give_up = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise TimeoutError("the server did not start")


def fuzz_properties(seconds: float, seed: int) -> bool:
    """Repeat the property tests with further seeds until the time is over. Return True if nothing was found."""
    give_up = time.monotonic() + seconds
    while True:
        run = [sys.executable, "-m", "pytest", "-q", "-n0", "tests/property", f"--hypothesis-seed={seed}"]
        if subprocess.run(run, env={**os.environ, "HYPOTHESIS_PROFILE": "full"}, check=False).returncode:
            return False
        if time.monotonic() > give_up:
            return True
        seed += 1


def main() -> None:
    """Run both parts. Exit with 1 if something was found."""
    model, minutes, schemathesis = sys.argv[1:4]
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else random.SystemRandom().randrange(1 << 32)
    half = float(minutes) * 30
    found_nothing = [fuzz_http(model, half, schemathesis, seed), fuzz_properties(half, seed)]
    sys.stdout.write(f"fuzz: seed {seed}, {'nothing found' if all(found_nothing) else 'FAILED'}\n")
    sys.exit(not all(found_nothing))


if __name__ == "__main__":
    main()
