"""Sizes of a model folder, from config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The properties of a model that matter here."""

    vocab_size: int
    max_positions: int


def read_model(folder: Path) -> ModelFacts:
    """Read the folder of a checkpoint or of compiled engines."""
    config = read_json(folder / "config.json")
    inner = config.get("pretrained_config", config)
    return ModelFacts(inner["vocab_size"], inner["max_position_embeddings"])


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`; empty if there is no such file."""
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
