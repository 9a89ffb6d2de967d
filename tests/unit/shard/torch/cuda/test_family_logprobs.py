"""Every family in bfloat16, on the GPU if there is one: logprobs close to those of transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from full_grid import full
from model_families import conditioned
from native_families import GPU_SHAPE, native_configs
from tiny_transformers import random_model, save

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine

CONFIGS = native_configs(GPU_SHAPE, head_dim=64, wide_head_dim=128)
LENGTHS = (3, 40, 130, 300)
MAX_ERROR = 2e-2
MAX_GAP = 1e-2
"""Mean distance, in standard deviations of the logits, of the token that we find most probable from the most probable one."""


@pytest.mark.parametrize("name", [name if name == "gemma3_text" else full(name) for name in CONFIGS])
def test_prompt_logprobs_in_bfloat16(name: str, tmp_path: Path, device: torch.device) -> None:
    model = conditioned(random_model(CONFIGS[name])).bfloat16()
    config = ShardConfig(model_path=save(model, tmp_path), device=device.type, dtype="bfloat16", max_batch_size=8)
    engine = build_engine(config)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=512)))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(GPU_SHAPE["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    streams = [
        driver.admit(prompt.tolist(), 2, chunk=100, prompt_logprobs=True, prompt_top_n=1, top_n=1) for prompt in prompts
    ]
    driver.run()
    model.float()
    differences, references, gaps = [], [], []
    for prompt, stream in zip(prompts, streams, strict=True):
        with torch.inference_mode():
            logits = model(prompt.unsqueeze(0)).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(1, prompt[1:].unsqueeze(1)).squeeze(1)
        ours = torch.tensor([value for scores in stream.prompt_logprobs for value in scores])[-len(expected) :]
        differences.append(ours - expected)
        references.append(expected)
        tops = [ids[0] for scores in stream.prompt_scores if scores.tops is not None for ids, _ in scores.tops if ids]
        found = logits.gather(1, torch.tensor(tops[-len(expected) :]).unsqueeze(1)).squeeze(1)
        gaps.append((logits.amax(-1) - found) / logits.std(-1))
    engine.close()
    assert float(torch.cat(differences).norm() / torch.cat(references).norm()) < MAX_ERROR
    assert float(torch.cat(gaps).mean()) < MAX_GAP
