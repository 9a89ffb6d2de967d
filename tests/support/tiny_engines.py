"""Small engines with random weights, for tests of the engine contract."""

from __future__ import annotations

import json
from pathlib import Path

from self_scheduling_echo import SelfSchedulingEcho

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.engines import build_engine

TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "dtype": "float32",
}


def tiny_engine(name: str, folder: Path, *, speculate: str = "0", **model: object) -> Engine:
    """Build "echo", "self-scheduling echo" or "torch" with 12 slots. `model` overrides fields of config.json in `folder`."""
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **model}))
    config = ShardConfig(
        engine=name.split()[-1],  # type: ignore[arg-type]
        model_path=str(folder),
        load_format="dummy",
        device="cpu",
        max_batch_size=12,
        speculate=speculate,
        echo_max_sequence_length=256,
    )
    return SelfSchedulingEcho.build(config) if name.startswith("self") else build_engine(config)
