"""Prefix caching in the torch engine: same results with cached blocks as without, and the blocks are not changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_driver import Driver, Stream
from full_grid import full
from native_families import LATENT
from tiny_transformers import SHAPE as TINY_SHAPE
from tiny_transformers import random_model, save
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, YoutuConfig

from text_generation_proto.values import FinishReason, Sampling, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine

SHAPE = TINY_SHAPE | {"num_hidden_layers": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "full attention": LlamaConfig(**SHAPE),
    "sliding window": MistralConfig(**SHAPE, sliding_window=19),
    "sliding window in some layers": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=32, max_window_layers=1
    ),
    "latent rows": YoutuConfig(**SHAPE | LATENT),
}
PREFIX = tuple((37 * i + 11) % 331 for i in range(64))
TAILS = tuple(tuple((53 * i + 7 * user) % 331 for i in range(length)) for user, length in enumerate((1, 5, 16, 40)))
SEEDED = Sampling(greedy=False, temperature=1.3, top_k=80, seed=23)
PENALIZED = Sampling(repetition_penalty=1.8, frequency_penalty=0.7)
"""Greedy, so that only the penalties' counts matter."""
SAMPLINGS = [
    full(Sampling()),
    full(SEEDED),
    PENALIZED,
    full(replace(SEEDED, output_presence_penalty=1.5, output_frequency_penalty=0.5)),
]
IDS = ["greedy", "seeded", "prompt penalized", "output penalized"]


@pytest.fixture(
    scope="module",
    params=[
        full("full attention"),
        full("sliding window"),
        "sliding window in some layers",
        "FP8 cache",
        "latent rows",
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    is_fp8 = request.param == "FP8 cache"
    config = CONFIGS["full attention" if is_fp8 else request.param]
    folder = save(random_model(config), tmp_path_factory.mktemp("checkpoint"))
    # Few slots, so that they are reused.
    kv_cache_dtype = "fp8_e4m3fn" if is_fp8 else "auto"
    config = ShardConfig(
        model_path=folder, device="cpu", max_batch_size=6, kv_cache_dtype=kv_cache_dtype, speculate="0"
    )
    return build_engine(config)


@pytest.fixture
def driver(engine: TorchEngine) -> Driver:
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=128)))
    # A read of a position that was not written gives NaN.
    with torch.inference_mode():
        for layer in engine._executor._runner.cache:
            layer.fill_(torch.nan)
    return driver


def blocks_of(driver: Driver, blocks: list[int]) -> Tensor:
    """Return a copy of blocks in every layer."""
    assert isinstance(driver.engine, TorchEngine)
    return torch.stack([layer[blocks].float() for layer in driver.engine._executor._runner.cache])


def without_reuse(driver: Driver, prompts: list[tuple[int, ...]], new: int, sampling: Sampling) -> list[list[int]]:
    """Return the tokens of each prompt when it is computed whole in its own blocks."""
    streams = [driver.admit(prompt, new, sampling=sampling) for prompt in prompts]
    driver.run()
    assert all(stream.finish is FinishReason.LENGTH for stream in streams)
    return [stream.tokens for stream in streams]


def sharing(driver: Driver, owner: Stream, prompt: tuple[int, ...], blocks: int, **settings: object) -> Stream:
    """Admit a sequence whose first tokens are in the first blocks of another."""
    shared = owner.blocks[:blocks]
    return driver.admit(prompt, shared=shared, computed_tokens=16 * blocks, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("owner_ends", ["continues", "finishes first", "is released"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_sequences_with_one_prefix_share_its_blocks(driver: Driver, sampling: Sampling, owner_ends: str) -> None:
    prompts = [PREFIX + tail for tail in TAILS]
    owner_prompt = (*PREFIX, 3)
    *expected, owner_tokens = without_reuse(driver, [*prompts, owner_prompt], 24, sampling)
    owner = driver.admit(owner_prompt, 24, sampling=sampling)
    for _ in range(5):
        driver.step()
    if owner_ends == "is released":
        driver.release(owner)
    elif owner_ends == "finishes first":
        driver.run()
    before = blocks_of(driver, owner.blocks[:4])
    assert torch.isfinite(before).all()
    # At different times, in different chunks, with different numbers of shared blocks.
    streams = []
    for prompt, blocks, chunk in zip(prompts, (4, 4, 3, 1), (99, 2, 7, 16), strict=True):
        streams.append(sharing(driver, owner, prompt, blocks, new=24, sampling=sampling, chunk=chunk))
        driver.step()
        driver.step()
    driver.run()
    assert [stream.tokens for stream in streams] == expected
    assert owner.tokens == owner_tokens[: len(owner.tokens)]
    assert torch.equal(blocks_of(driver, owner.blocks[:4]), before)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_the_next_turn_of_a_chat_reuses_generated_tokens(driver: Driver, sampling: Sampling) -> None:
    first = driver.admit(PREFIX, 40, sampling=sampling)
    driver.run()
    turn = (*PREFIX, *first.tokens, *TAILS[1])
    (expected,) = without_reuse(driver, [turn], 30, sampling)
    # 64 + 39 tokens of the first sequence are computed: six blocks.
    before = blocks_of(driver, first.blocks[:6])
    second = sharing(driver, first, turn, 6, new=30, sampling=sampling)
    driver.run()
    assert second.tokens == expected
    assert torch.equal(blocks_of(driver, first.blocks[:6]), before)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_a_preempted_sequence_resumes_on_its_own_blocks(driver: Driver, sampling: Sampling) -> None:
    (expected,) = without_reuse(driver, [PREFIX], 60, sampling)
    before = driver.admit(PREFIX, 60, sampling=sampling)
    for _ in range(40):
        driver.step()
    after = driver.preempt(before, shared=before.blocks[:6], computed_tokens=96)
    driver.run()
    assert before.tokens + after.tokens == expected


def test_a_partly_cached_block_is_continued_and_not_cleared(driver: Driver) -> None:
    prompt = (*PREFIX, *TAILS[1])  # 69 tokens
    (expected,) = without_reuse(driver, [prompt], 24, Sampling())
    owner = driver.admit(prompt, 1)
    driver.run()
    before = blocks_of(driver, owner.blocks[:4])
    stream = driver.admit(prompt, 24, shared=owner.blocks[:5], computed_tokens=68)
    driver.run()
    assert stream.tokens == expected
    assert torch.equal(blocks_of(driver, owner.blocks[:4]), before)


def test_a_reused_slot_reads_the_blocks_of_its_new_sequence(driver: Driver) -> None:
    other = tuple(reversed(PREFIX))
    expected = without_reuse(driver, [PREFIX + TAILS[2], other + TAILS[2]], 12, Sampling())
    owners = [driver.admit(PREFIX, 1), driver.admit(other, 1)]
    driver.run()
    for _ in range(3):
        replies = []
        for owner, prefix in zip(owners, (PREFIX, other), strict=True):
            stream = sharing(driver, owner, prefix + TAILS[2], 4, new=12)
            assert stream.slot == 0
            driver.run()
            replies.append(stream.tokens)
        assert replies == expected
