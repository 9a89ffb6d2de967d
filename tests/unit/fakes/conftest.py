"""Fixtures for tests of the stand-in for tensorrt_llm."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer

sys.path.append(str(Path(__file__).parents[2] / "fakes" / "tensorrt_llm" / "common"))

from standin_loading import VERSIONS, Standin, standing_in


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take no time by default."""
    monkeypatch.setenv("TRTLLM_STANDIN_STEP_MS", "0")


@pytest.fixture(params=VERSIONS)
def standin(request: pytest.FixtureRequest) -> Iterator[Standin]:
    """Each release in turn."""
    with standing_in(request.param) as standin:
        yield standin


@pytest.fixture
def old() -> Iterator[Standin]:
    """1.2 alone."""
    with standing_in("1.2") as standin:
        yield standin


@pytest.fixture
def new() -> Iterator[Standin]:
    """1.3 alone."""
    with standing_in("1.3") as standin:
        yield standin


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the stand-in's variables: `set_up(step_ms=5)`."""

    def apply(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"TRTLLM_STANDIN_{name.upper()}", str(value))

    return apply


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with a configuration and a byte tokenizer. Tokens 0 and 1 end a text; 0 is the tokenizer's EOS token."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = write_tokenizer(folder)
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512, "eos_token_id": [0, 1]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder
