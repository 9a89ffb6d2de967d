"""Engines over the stand-in for TensorRT-LLM, of every release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from standin import VERSIONS, model_folder
from trtllm_engines import Engines


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def built(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    engines = Engines(version, model_folder(tmp_path / "model"), monkeypatch)
    yield engines
    engines.close()
