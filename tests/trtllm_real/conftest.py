"""Engines over NVIDIA's own code, and which of the adapter's tests do not apply to it: see `make test-trtllm-real`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from standin import REAL, VERSIONS, model_folder
from trtllm_engines import Engines


@pytest.fixture
def version() -> str:
    return REAL


@pytest.fixture
def built(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    engines = Engines(version, model_folder(tmp_path / "model"), monkeypatch)
    yield engines
    engines.close()


assert VERSIONS == (REAL,), "TRTLLM_REAL_RELEASE is not set"
