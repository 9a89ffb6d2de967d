"""The error of an FP8 KV cache, measured with the demo model in float32.

`TEST_FULL=1 pytest -s tests/model/test_fp8_cache.py` prints the figures of docs/quantization.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from engine_driver import Driver, Stream
from tokenizers import Tokenizer
from torch import Tensor

from text_generation_proto.values import WarmUpLimits
from text_generation_router.audit.verdict import ROUNDED
from text_generation_shard.config import KVCacheDType, ShardConfig
from text_generation_shard.engines import build_engine

pytestmark = pytest.mark.model


CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = [
    "What is the capital of France?",
    "Explain how a bicycle stays upright.",
    "Write a haiku about the sea.",
    "Why is the sky blue?",
    "List three uses of baking soda.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' to Spanish.",
    "What is 12 times 12?",
    "Summarize the plot of Cinderella.",
    "Give me a recipe for pancakes.",
    "How do vaccines work?",
    "What is photosynthesis?",
    "Name the planets of the solar system.",
    "Write a short email asking for a day off.",
    "Tell me a joke about programmers.",
    "How do I boil an egg?",
    "What causes earthquakes?",
    "Define the word 'serendipity'.",
    "What are the benefits of exercise?",
    "Write a Python function that reverses a string.",
    "Describe the water cycle.",
    "Who was Albert Einstein?",
    "Name a puppy.",
    "How many days are in a leap year?",
    "Give three tips for better sleep.",
    "What is machine learning?",
    "Explain gravity to a child.",
    "Write a slogan for a coffee shop.",
    "What is the largest ocean?",
    "How does a microwave oven work?",
    "Compare cats and dogs.",
    "What is the boiling point of water?",
]
NEW_TOKENS = 64


def driver_of(folder: Path, kv_cache_dtype: KVCacheDType) -> Driver:
    config = ShardConfig(
        model_path=str(folder), dtype="float32", device="cpu", max_batch_size=32, kv_cache_dtype=kv_cache_dtype
    )
    limits = WarmUpLimits(max_batch_total_tokens=8192, max_batch_prefill_tokens=64, max_batch_size=1)
    engine = build_engine(config)
    return Driver(engine, engine.warm_up(limits))


def scores(driver: Driver, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token of texts, and the most probable one in its place."""
    streams = [driver.admit(text, 1, prompt_logprobs=True, prompt_top_n=1) for text in texts]
    driver.run()
    parts = [part for stream in streams for part in stream.prompt_scores]
    logprobs = torch.tensor([*chain.from_iterable(part.logprobs for part in parts)])
    best = torch.tensor([(ids or (0,))[0] for part in parts for ids, _ in part.tops])
    return logprobs.nan_to_num(), best


@pytest.mark.full
def test_log_probabilities_and_best_tokens_are_nearly_those_of_a_wide_cache(
    demo_model: Path, prompts: list[tuple[int, ...]]
) -> None:
    some = [prompt for prompt in prompts if 100 <= len(prompt) <= 127]
    exact, best = scores(driver_of(demo_model, "auto"), some)
    for kind, error, equal in (("fp8_e4m3fn", 0.2, 0.9), ("fp8_e5m2", 0.4, 0.8)):
        found, own_best = scores(driver_of(demo_model, kind), some)  # type: ignore[arg-type]
        assert error / 4 < (found - exact).abs().mean() < error
        assert (own_best == best).float().mean() > equal


@pytest.mark.full
def test_greedy_texts(demo_model: Path) -> None:
    """Texts are compared as they are generated, and the scores of their tokens after those of a wide cache."""
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    prompts = [tokenizer.encode(CHAT.format(question)).ids for question in QUESTIONS]

    def generate(driver: Driver, prompts: list[list[int]]) -> list[Stream]:
        streams = [driver.admit(prompt, NEW_TOKENS) for prompt in prompts]
        driver.run()
        return streams

    def texts(driver: Driver) -> list[list[int]]:
        return [stream.tokens for stream in generate(driver, prompts)]

    wide = driver_of(demo_model, "auto")
    expected = texts(wide)
    forced = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]
    generated = torch.tensor([at >= len(prompt) for prompt in prompts for at in range(len(prompt) + NEW_TOKENS)])
    exact, best = scores(wide, forced)
    for kind in ("fp8_e4m3fn", "fp8_e5m2"):
        driver = driver_of(demo_model, kind)  # type: ignore[arg-type]
        found = texts(driver)
        equal = {
            length: sum(own[:length] == other[:length] for own, other in zip(found, expected, strict=True))
            for length in (8, 16, 32, 64)
        }
        logprobs, own_best = scores(driver, forced)
        error = (logprobs - exact)[generated].abs().mean()
        same = (own_best == best)[generated].float().mean()
        print(f"{kind}: equal of {len(prompts)} by length {equal}, error {error:.3f} nats, best token equal {same:.1%}")
        assert error < 0.15
        assert same > 0.9
        # With few rows a step does not round as a replay does: see docs/audits.md.
        few = generate(driver, prompts[:4])
        replayed, _ = scores(driver, [[*stream.prompt, *stream.tokens] for stream in few])
        served = torch.tensor([*chain.from_iterable(stream.logprobs for stream in few)])
        difference = (replayed[generated[: len(replayed)]] - served).abs().max()
        print(f"{kind}: decoding and replay differ by up to {difference:.2f} nats")
        assert difference < ROUNDED.token
