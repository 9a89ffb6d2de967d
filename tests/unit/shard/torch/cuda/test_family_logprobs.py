"""Every family in bfloat16, on the GPU if there is one: logprobs close to those of transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from full_grid import full
from model_families import conditioned
from native_families import GPU_SHAPE, native_configs
from tiny_transformers import random_model, save
from torch import Tensor
from transformers import PreTrainedModel

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine

CONFIGS = native_configs(GPU_SHAPE, head_dim=64, wide_head_dim=128)
LENGTHS = (3, 40, 130, 300)
MAX_ERROR = 2e-2
"""Relative, of the logprobs."""
MAX_GAP = 1e-2
"""Mean distance, in standard deviations of the logits, of the token found most probable from the most probable one."""
ALSO = 1.2
"""Errors of transformers in bfloat16 that are allowed too: rounding may change the choice of experts."""


@torch.inference_mode()
def logits_of(model: PreTrainedModel, prompts: Sequence[Tensor]) -> Tensor:
    """Return the logits that predict the tokens of prompts behind their first."""
    return torch.cat([model(prompt.unsqueeze(0)).logits[0, :-1].float() for prompt in prompts])


def gap(logits: Tensor, tops: Tensor) -> float:
    found = logits.gather(1, tops.unsqueeze(1)).squeeze(1)
    return float(((logits.amax(-1) - found) / logits.std(-1)).mean())


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
    engine.close()
    ours, tops = list[float](), list[int]()
    for stream, length in zip(streams, LENGTHS, strict=True):
        ours += [value for scores in stream.prompt_logprobs for value in scores][1 - length :]
        best = [ids[0] for scores in stream.prompt_scores if scores.tops is not None for ids, _ in scores.tops if ids]
        tops += best[1 - length :]
    rounded, exact = logits_of(model, prompts), logits_of(model.float(), prompts)
    targets = torch.cat([prompt[1:] for prompt in prompts]).unsqueeze(1)
    expected, own = (each.log_softmax(-1).gather(1, targets).squeeze(1) for each in (exact, rounded))
    most = max(MAX_ERROR, ALSO * float((own - expected).norm() / expected.norm()))
    assert float((torch.tensor(ours) - expected).norm() / expected.norm()) < most
    assert gap(exact, torch.tensor(tops)) < max(MAX_GAP, ALSO * gap(exact, rounded.argmax(-1)))
