"""What a model folder says: sizes and end tokens, from config.json and generation_config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1 << 20
"""Where no folder tells: larger than any tokenizer's, so that ids of whatever tokenizer pass."""
MAX_POSITIONS = 32768


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the stand-in needs to know of a model."""

    vocab_size: int = VOCAB_SIZE
    max_positions: int = MAX_POSITIONS
    eos_token_ids: tuple[int, ...] = ()
    """From generation_config.json, else config.json; the first is the tokenizer's, as far as one can tell."""


def read_model(folder: Path) -> ModelFacts:
    """Facts of the model in `folder`; defaults where it is no folder, or says nothing. Raises ValueError if its
    config.json is no JSON."""
    config = read_json(folder / "config.json")
    inner = {**config, **config.get("text_config", {})}
    ends = read_json(folder / "generation_config.json").get("eos_token_id", inner.get("eos_token_id"))
    return ModelFacts(
        vocab_size=inner.get("vocab_size", VOCAB_SIZE),
        max_positions=inner.get("max_position_embeddings", MAX_POSITIONS),
        eos_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty where there is no such file."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found
