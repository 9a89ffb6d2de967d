"""The packages of the browser tests: a browser, its driver, axe and the charting library."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def packages() -> Path:
    """Folder of the installed packages: BROWSER_HOME, or .cache/browser as made by `make browser-packages`."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    default = Path(__file__).parents[2] / ".cache" / "browser"
    folder = Path(os.environ.get("BROWSER_HOME", default)) / "node_modules"
    if not folder.is_dir():
        pytest.fail(f"there are no packages in {folder}: run `make browser-packages`")
    return folder
