"""Predicted tokens in bfloat16, on the GPU by its graphs if there is one: as probable as those of the layer in float32."""

from __future__ import annotations

from pathlib import Path

import eagle_models
import pytest
import torch
from eagle_models import EagleModel
from engine_driver import Driver
from full_grid import full
from native_families import GPU_SHAPE, native_configs
from prediction_layers import PredictionLayer
from scripted_drafts import Predicted, draft_by
from transformers import LlamaConfig

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine

CONFIGS = native_configs(GPU_SHAPE, head_dim=64, wide_head_dim=128)
MAX_GAP = 0.15
"""Mean distance, in standard deviations of the logits, of a predicted token from the most probable one. That of any tokens is 3."""


@pytest.mark.parametrize(
    "family", [*map(full, ("qwen2", "glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_text", "EAGLE-3"))]
)
def test_predicted_tokens_are_probable(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_models, "HEAD_DIM", 64)
    is_eagle = family == "EAGLE-3"
    layer = EagleModel(LlamaConfig(**GPU_SHAPE, head_dim=64)) if is_eagle else PredictionLayer(CONFIGS[family])
    folder = str(layer.write(tmp_path))
    engine = build_engine(
        ShardConfig(
            model_path=folder,
            device=device.type,
            dtype="bfloat16",
            max_batch_size=16,
            speculate="3",
            speculator=f"{folder}/draft" if is_eagle else "",
        )
    )
    assert isinstance(engine, TorchEngine)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))
    draft_by(engine, drafter := Predicted(3))
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(GPU_SHAPE["vocab_size"], (length,), generator=generator).tolist() for length in (3, 40, 130)
    ]  # type: ignore[arg-type]
    streams = [driver.admit(prompt, 12, chunk=100) for prompt in prompts]
    driver.run()
    engine.close()
    assert [stream.failure for stream in streams] == [None] * 3
    gaps: list[float] = []
    for tokens, found in drafter.found:
        expected, logits = layer.drafts(tokens, len(found))
        ids = layer.tokens.tolist() if isinstance(layer, EagleModel) else range(logits.shape[1])
        for token, best, own in zip(found, expected, logits, strict=True):
            gaps.append(float((own.max() - own[ids.index(token)]) / own.std()))
            if token != best:  # what follows has another text
                break
    print(
        f"{sum(gap > 0 for gap in gaps)} of {len(gaps)} predicted tokens differ, mean gap {sum(gaps) / len(gaps):.4f}"
    )
    assert len(gaps) > 20
    assert sum(gaps) / len(gaps) < MAX_GAP
