"""The description of an engine on a GPU, for tests of what only reads it."""

from __future__ import annotations

from text_generation_shard.engine import EngineInfo, Scheduling

GPU_ENGINE = EngineInfo(
    engine="torch",
    model_id="",
    model_type="llama",
    scheduling=Scheduling.STEP,
    eos_token_ids=(2,),
    suggested_prefill_tokens=2048,
    max_top_n_tokens=5,
    dtype="float32",
    device="cuda",
    vocab_size=1000,
    block_size=4,
    max_slots=64,
    max_sequence_length=4096,
)
