"""In float32 the torch engine generates the same tokens as transformers, regardless of the composition of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from full_grid import full
from transformers import AutoModelForCausalLM

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine

pytestmark = pytest.mark.model

NEW_TOKENS = 24

Prompts = list[tuple[int, ...]]


@pytest.fixture(scope="module", params=[0, *map(full, range(1, 8))], ids="prompts from {} on".format)
def some(request: pytest.FixtureRequest, prompts: Prompts) -> Prompts:
    """An eighth of the prompts; the first is of 1, 17 and 100 tokens."""
    return prompts[request.param :: 8]


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> TorchEngine:
    # Without drafts, whose number in a step depends on measured times: sequences are preempted in given steps.
    config = ShardConfig(model_path=str(demo_model), dtype="float32", device="cpu", max_batch_size=32, speculate="0")
    return build_engine(config)


def warm(engine: TorchEngine) -> Driver:
    limits = WarmUpLimits(max_batch_total_tokens=8192, max_batch_prefill_tokens=64, max_batch_size=1)
    return Driver(engine, engine.warm_up(limits))


@pytest.fixture(scope="module")
def together(engine: TorchEngine, some: Prompts) -> list[list[int]]:
    """The tokens of the prompts, all started in the same step."""
    driver = warm(engine)
    streams = [driver.admit(prompt, NEW_TOKENS) for prompt in some]
    driver.run()
    return [stream.tokens for stream in streams]


def test_transformers_predicts_each_token(demo_model: Path, some: Prompts, together: list[list[int]]) -> None:
    """Each token is the most probable one after those before it: the tokens that `generate` would return."""
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    for prompt, tokens in zip(some, together, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        assert len(tokens) == NEW_TOKENS


@pytest.mark.full
def test_staggered_in_chunks_and_preempted(engine: TorchEngine, some: Prompts, together: list[list[int]]) -> None:
    driver = warm(engine)
    streams = []
    for prompt in some:
        streams.append(driver.admit(prompt, NEW_TOKENS, chunk=48))
        for _ in range(3):
            driver.step()
    replies = []
    for stream in streams:
        resumed = None if stream.is_over else driver.preempt(stream)
        for _ in range(2):
            driver.step()
        replies.append((stream, resumed))
    driver.run()
    assert any(resumed is not None and stream.tokens for stream, resumed in replies)
    assert [stream.tokens + (resumed.tokens if resumed else []) for stream, resumed in replies] == together
