"""Chooses the source of the weights."""

from __future__ import annotations

from pathlib import Path

from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.weights import NamedParameters, fill_dummy, load_weights


def load(config: ShardConfig, targets: NamedParameters) -> None:
    """Load the parameters from the checkpoint, or fill them at random. Raises EngineError with a one-line message."""
    if config.load_format == "dummy":
        fill_dummy(targets)
    else:
        load_weights(Path(config.model_path), targets)
