"""What tests of every kind share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct: TGI_DEMO_MODEL, or where `make model` puts it."""
    default = Path(__file__).parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct"
    folder = Path(os.environ.get("TGI_DEMO_MODEL", default))
    if not (folder / "config.json").is_file():
        pytest.fail(f"there is no demo model in {folder}: run `make model`")
    return folder
