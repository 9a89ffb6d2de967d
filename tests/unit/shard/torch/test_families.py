"""Random tiny checkpoints of every supported family give the same float32 results as transformers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from engine_driver import Driver, Stream
from full_grid import full
from native_families import native_configs
from reference_kernels import reference_engine
from tiny_transformers import SHAPE as TINY_SHAPE
from tiny_transformers import random_model, save
from vision_models import vision_configs

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.models.huggingface.library import ALIASES
from text_generation_shard.engines.torch.models.native.families import FAMILIES
from text_generation_shard.engines.torch.models.native.wrappers import WRAPPERS

NEW_TOKENS = 6
LENGTHS = (1, 16, 31, 50, 200)
SHAPE = TINY_SHAPE | {"max_position_embeddings": 256, "tie_word_embeddings": False}
CONFIGS = native_configs(SHAPE, head_dim=16, wide_head_dim=24)
ALSO_COVERED = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3_text",
    "gemma3_text, scaled",
    "gemma4_text",
    "falcon_h1",
    "ministral",
    "glm",
    "phi3",
    "seed_oss",
    "mixtral",
    "qwen3_5_moe_text",
    "olmo_hybrid, with rotation",
    "youtu",
    "llama, tied",
    "llama, yarn rope",
    "qwen3, tied",
    "glm4_moe, no norms",
    "glm4_moe_lite",
    "deepseek_v2",
    "qwen3_5_moe, text part",
    "granitemoehybrid",
    "bamba",
    "falcon_h1, normed",
    "lfm2",
    "nemotron_h",
}
"""Configs whose features other configs cover. The tests of rope frequencies cover the other rope types."""


@dataclass
class Pair:
    """An engine, and the results of transformers with the same checkpoint."""

    engine: TorchEngine
    on_device: Engine
    """An engine with asynchronous steps and the reference kernels."""
    prompts: list[tuple[int, ...]]
    reference: list[list[int]]
    prompt_logprobs: list[float]
    """Logprobs of the longest prompt, without its first token."""

    def driver(self) -> Driver:
        return Driver(
            self.engine, self.engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=512))
        )


@pytest.fixture(scope="module", params=[full(name) if name in ALSO_COVERED else name for name in CONFIGS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = random_model(CONFIGS[request.param])
    folder = save(model, tmp_path_factory.mktemp("checkpoint"))
    config = ShardConfig(model_path=folder, device="cpu", max_batch_size=16)
    engine, on_device = build_engine(config), reference_engine(config)
    prompts = [tuple(torch.randint(0, SHAPE["vocab_size"], (length,)).tolist()) for length in LENGTHS]
    reference = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
            )
            reference.append(out[0, len(prompt) :].tolist())
        logprobs = model(torch.tensor([prompts[-1]])).logits[0].float().log_softmax(-1)
    targets = torch.tensor(prompts[-1][1:])
    return Pair(
        engine, on_device, prompts, reference, logprobs[:-1].gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
    )


def test_every_family_has_a_case() -> None:
    within = {wrapper.text_type for wrapper in WRAPPERS.values()}
    known = {name.partition(",")[0] for name in (*CONFIGS, *vision_configs())}
    assert {*WRAPPERS, *FAMILIES} - known - ALIASES.keys() <= within
    assert known <= {*WRAPPERS, *FAMILIES}


def test_greedy_tokens_and_prompt_logprobs(pair: Pair) -> None:
    driver = pair.driver()
    lone = driver.admit(pair.prompts[-1], NEW_TOKENS)
    driver.run()
    assert lone.tokens == pair.reference[-1], "alone"
    streams = [driver.admit(prompt, NEW_TOKENS, prompt_logprobs=True) for prompt in pair.prompts]
    driver.run()
    assert [stream.tokens for stream in streams] == pair.reference, "all at once"
    logprobs, expected_logprobs = torch.tensor([streams[-1].prompt_logprobs[0][1:], pair.prompt_logprobs])
    assert (logprobs - expected_logprobs).norm() <= 1e-5 * expected_logprobs.norm()


def staggered(driver: Driver, prompts: list[tuple[int, ...]], chunk: int = 11) -> list[Stream]:
    """Admit prompts in chunks while earlier ones decode."""
    streams = []
    for prompt in prompts:
        streams.append(driver.admit(prompt, NEW_TOKENS, chunk=chunk))
        driver.step()
        driver.step()
    return streams


@pytest.mark.parametrize("chunk", [11, full(17), full(64)])
def test_greedy_tokens_with_chunked_staggered_and_preempted_prompts(pair: Pair, chunk: int) -> None:
    driver = pair.driver()
    streams = staggered(driver, pair.prompts, chunk)
    replies = []
    for stream in streams:
        resumed = None if stream.is_over else driver.preempt(stream)
        driver.step()
        replies.append((stream, resumed))
    driver.run()
    tokens = [stream.tokens + (resumed.tokens if resumed else []) for stream, resumed in replies]
    assert tokens == pair.reference


def test_greedy_tokens_of_the_operations_of_a_gpu(pair: Pair) -> None:
    driver = Driver(
        pair.on_device, pair.on_device.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=512))
    )
    streams = staggered(driver, pair.prompts)
    driver.run()
    assert [stream.tokens for stream in streams] == pair.reference
