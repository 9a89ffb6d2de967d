"""Prompts for the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

PROMPT_LENGTHS = [
    *(1, 2, 3, 5, 8, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65),
    *(100, 127, 128, 200, 333, 512, 1000, 1500),
]


@pytest.fixture(scope="session")
def prompts(demo_model: Path) -> list[tuple[int, ...]]:
    """Natural text of 24 lengths, from different positions of the license."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(text).ids
    starts = [(37 * i) % (len(ids) - length) for i, length in enumerate(PROMPT_LENGTHS)]
    return [tuple(ids[start : start + length]) for start, length in zip(starts, PROMPT_LENGTHS, strict=True)]
