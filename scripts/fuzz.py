"""Fuzz the server for some minutes: half with requests that schemathesis makes from its OpenAPI document, half with the
property tests under other seeds.

Usage: python scripts/fuzz.py MODEL MINUTES [SEED]

A failure is printed with the seed, the curl command or the example that reproduces it: add it to the tests as an @example, and a
message between router and shard to tests/corpus, whose findings are tried first.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time


def passes(folder: str, *arguments: str, **environ: str) -> bool:
    """Run the tests of a folder with these variables in the environment. Return True if all pass."""
    run = [sys.executable, "-m", "pytest", "-q", "-n0", folder, *arguments]
    return subprocess.run(run, env=os.environ | environ, check=False).returncode == 0


def properties_hold(seconds: float, seed: int) -> bool:
    """Repeat the property tests with further seeds until the time is over or one fails."""
    give_up = time.monotonic() + seconds
    while passes("tests/property", f"--hypothesis-seed={seed}", HYPOTHESIS_PROFILE="full"):
        if time.monotonic() > give_up:
            return True
        seed += 1
    return False


def main() -> None:
    """Run both parts. Exit with 1 if something was found."""
    model, minutes = sys.argv[1:3]
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.SystemRandom().randrange(1 << 32)
    half = float(minutes) * 30
    requests = {"TGI_DEMO_MODEL": model, "SCHEMATHESIS_SECONDS": str(int(half)), "SCHEMATHESIS_SEED": str(seed)}
    found_nothing = [
        passes("tests/clients/test_schemathesis.py", TEST_FULL="1", **requests),
        properties_hold(half, seed),
    ]
    sys.stdout.write(f"fuzz: seed {seed}, {'nothing found' if all(found_nothing) else 'FAILED'}\n")
    sys.exit(not all(found_nothing))


if __name__ == "__main__":
    main()
