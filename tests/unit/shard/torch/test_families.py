"""Random tiny checkpoints of every supported family give the same float32 results as transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_driver import Driver, Stream
from full_grid import full
from tiny_transformers import SHAPE as TINY_SHAPE
from tiny_transformers import random_model, save
from transformers import (
    Ernie4_5Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    MistralConfig,
    Phi3Config,
    PixtralVisionConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SiglipVisionConfig,
    SmolLM3Config,
)

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.build import engine_info
from text_generation_shard.engines.torch.cuda.build import build_on_cuda
from text_generation_shard.engines.torch.engine import TorchEngine
from text_generation_shard.engines.torch.model.config import read_model_config

NEW_TOKENS = 16
LENGTHS = (1, 16, 31, 50, 200)
SHAPE = TINY_SHAPE | {"max_position_embeddings": 256, "tie_word_embeddings": False}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, tied": LlamaConfig(**SHAPE | {"tie_word_embeddings": True}),
    "llama, biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama, no grouped queries": LlamaConfig(**SHAPE | {"num_key_value_heads": 6}),
    "llama, wide heads, gelu": LlamaConfig(**SHAPE, head_dim=24, hidden_act="gelu_pytorch_tanh"),
    "llama, yarn rope": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral, sliding window": MistralConfig(**SHAPE, sliding_window=19),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2, sliding window in some layers": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=32, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3, tied": Qwen3Config(**SHAPE | {"tie_word_embeddings": True}, head_dim=16, attention_bias=True),
    "gemma": GemmaConfig(**SHAPE, head_dim=16),
    "gemma2": Gemma2Config(
        **SHAPE | {"tie_word_embeddings": True},
        head_dim=16,
        sliding_window=19,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=19, layer_types=MIXED, query_pre_attn_scalar=24
    ),
    "gemma3_text, scaled": Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 6},
        head_dim=16,
        sliding_window=32,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": Phi3Config(**SHAPE, sliding_window=40),
    "phi3, partial rotation, longrope": Phi3Config(
        **SHAPE,
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 2.5],
            "long_factor": [9.0, 9.0],
        },
    ),
    "granite": GraniteConfig(
        **SHAPE,
        attention_bias=True,
        embedding_multiplier=7.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=4.0,
    ),
    "ministral": MinistralConfig(**SHAPE, head_dim=8, sliding_window=19, layer_types=MIXED),
    "ministral3": Ministral3Config(
        **SHAPE,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e5,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "glm": GlmConfig(**SHAPE, head_dim=16),
    "glm4": Glm4Config(**SHAPE, head_dim=16),
    "gemma3, text part": Gemma3Config(
        text_config=Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=19, layer_types=MIXED).to_dict(),
        vision_config=SiglipVisionConfig(**VISION).to_dict(),
        image_token_index=3,
    ),
    "mistral3, text part": Mistral3Config(
        text_config=MistralConfig(**SHAPE, head_dim=8, sliding_window=None).to_dict(),
        vision_config=PixtralVisionConfig(**VISION).to_dict(),
        tie_word_embeddings=False,
        image_token_index=3,
    ),
    "seed_oss": SeedOssConfig(**SHAPE, head_dim=16),
    "smollm3": SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1]),
    "ernie4_5": Ernie4_5Config(**SHAPE, head_dim=16, use_bias=True),
}
ALSO_COVERED = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3_text, scaled",
    "ministral",
    "glm",
    "phi3",
    "seed_oss",
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
        return Driver(self.engine, self.engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))


@pytest.fixture(scope="module", params=[full(name) if name in ALSO_COVERED else name for name in CONFIGS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = random_model(CONFIGS[request.param])
    folder = save(model, tmp_path_factory.mktemp("checkpoint"))
    config = ShardConfig(model_path=folder, device="cpu", max_batch_size=16)
    engine, model_config = build_engine(config), read_model_config(Path(folder))
    info = engine_info(config, model_config, torch.device("cpu"), None)
    on_device = build_on_cuda(config, model_config, info, None)
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


def test_greedy_tokens_and_prompt_logprobs(pair: Pair) -> None:
    driver = pair.driver()
    for prompt, expected in list(zip(pair.prompts, pair.reference, strict=True))[::2]:
        lone = driver.admit(prompt, NEW_TOKENS)
        driver.run()
        assert lone.tokens == expected, "alone"
    streams = [driver.admit(prompt, NEW_TOKENS, prompt_logprobs=True) for prompt in pair.prompts]
    driver.run()
    assert [stream.tokens for stream in streams] == pair.reference, "all at once"
    assert streams[-1].prompt_logprobs[0][1:] == pytest.approx(pair.prompt_logprobs, abs=2e-4)


def staggered(driver: Driver, prompts: list[tuple[int, ...]]) -> list[Stream]:
    """Admit prompts in chunks while earlier ones decode."""
    streams = []
    for prompt in prompts:
        streams.append(driver.admit(prompt, NEW_TOKENS, chunk=11))
        driver.step()
        driver.step()
    return streams


def test_greedy_tokens_with_chunked_staggered_and_preempted_prompts(pair: Pair) -> None:
    driver = pair.driver()
    streams = staggered(driver, pair.prompts)
    replies = []
    for stream in streams:
        resumed = None if stream.is_over else driver.preempt(stream)
        driver.step()
        replies.append((stream, resumed))
    driver.run()
    tokens = [stream.tokens + (resumed.tokens if resumed else []) for stream, resumed in replies]
    assert tokens == pair.reference


def test_greedy_tokens_of_the_operations_of_a_gpu(pair: Pair) -> None:
    driver = Driver(pair.on_device, pair.on_device.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))
    streams = staggered(driver, pair.prompts)
    driver.run()
    assert [stream.tokens for stream in streams] == pair.reference
