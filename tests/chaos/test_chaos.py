"""A sample of the matrix with a fixed seed: the same as `make chaos`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.full
@pytest.mark.system
@pytest.mark.timeout(1800)
def test_every_fault_has_its_documented_outcome(demo_model: Path) -> None:
    command = [sys.executable, str(FOLDER), "--model", str(demo_model), "--minutes", "10", "--seed", "1"]
    folders = (str(FOLDER.parent / name) for name in ("system", "support"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
