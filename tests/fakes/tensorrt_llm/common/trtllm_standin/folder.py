"""Sizes and end tokens of a model folder, from config.json and generation_config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1 << 20
"""Default; larger than any tokenizer's vocabulary."""
MAX_POSITIONS = 32768


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The properties of a model that matter here."""

    vocab_size: int = VOCAB_SIZE
    max_positions: int = MAX_POSITIONS
    eos_token_ids: tuple[int, ...] = ()
    """From generation_config.json, else config.json."""


def read_model(folder: Path) -> ModelFacts:
    """Read the folder; defaults if it is missing. Raises ValueError if config.json is not JSON."""
    config = read_json(folder / "config.json")
    inner = {**config, **config.get("text_config", {})}
    ends = read_json(folder / "generation_config.json").get("eos_token_id", inner.get("eos_token_id"))
    return ModelFacts(
        vocab_size=inner.get("vocab_size", VOCAB_SIZE),
        max_positions=inner.get("max_position_embeddings", MAX_POSITIONS),
        eos_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`; empty if there is no such file."""
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
