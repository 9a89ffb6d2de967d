"""Where a shard's weights come from."""

from __future__ import annotations

from pathlib import Path

from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.weights import Targets, fill_dummy, load_weights


def load(config: ShardConfig, targets: Targets) -> None:
    """Fill them: from the checkpoint, or at random. Raises EngineError in one line."""
    if config.load_format == "dummy":
        fill_dummy(targets)
    else:
        load_weights(Path(config.model_path), targets)
