"""What the adapter has to know of a Hugging Face model folder before TensorRT-LLM reads it.

The engine in its worker process does not tell what it settled on (`LLM.args` is the copy that went in), so the limits that
matter are read here and passed to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text_generation_shard.engine import EngineError

LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "model_max_length")
"""What config.json may call the longest sequence."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Read from config.json and generation_config.json."""

    model_type: str
    dtype: str
    """The checkpoint's; "" if it does not say."""
    vocab_size: int
    max_sequence_length: int
    eos_token_ids: tuple[int, ...]


def read_facts(folder: Path) -> ModelFacts:
    """Of the model in `folder`. Raises EngineError."""
    config = _read(folder / "config.json", required=True)
    text = config.get("text_config")
    # Models that see as well as read keep what concerns text apart.
    text = {**config, **text} if isinstance(text, dict) else config
    generation = _read(folder / "generation_config.json", required=False)
    length = next((text[name] for name in LENGTH_NAMES if _is_count(text.get(name))), None)
    if length is None:
        raise EngineError(f"{folder / 'config.json'} does not say how long a sequence may be ({LENGTH_NAMES[0]})")
    if not _is_count(text.get("vocab_size")):
        raise EngineError(f"{folder / 'config.json'} does not say how large the vocabulary is (vocab_size)")
    return ModelFacts(
        model_type=str(config.get("model_type", "")),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or ""),
        vocab_size=text["vocab_size"],
        max_sequence_length=length,
        eos_token_ids=_ids(generation.get("eos_token_id")) or _ids(text.get("eos_token_id")),
    )


def _read(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        read = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise EngineError(f"{path} holds no object")
    return read


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0)
