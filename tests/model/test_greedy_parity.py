"""In float32 the torch engine generates the same tokens as transformers, regardless of the composition of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_driver import Driver

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine import TorchEngine

pytestmark = pytest.mark.model

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> TorchEngine:
    return build_engine(ShardConfig(model_path=str(demo_model), dtype="float32", device="cpu", max_batch_size=32))


@pytest.fixture
def driver(engine: TorchEngine) -> Driver:
    limits = WarmUpLimits(max_batch_total_tokens=8192, max_batch_prefill_tokens=64, max_batch_size=1)
    return Driver(engine, engine.warm_up(limits))


def test_alone(driver: Driver, prompts: list[tuple[int, ...]], reference: list[list[int]]) -> None:
    # Every fourth prompt only, because running alone is slowest; the others run in the tests below.
    for prompt, expected in zip(prompts[::4], reference[::4], strict=True):
        stream = driver.admit(prompt, NEW_TOKENS)
        driver.run()
        assert stream.tokens == expected


def test_all_at_once(driver: Driver, prompts: list[tuple[int, ...]], reference: list[list[int]]) -> None:
    streams = [driver.admit(prompt, NEW_TOKENS) for prompt in prompts]
    driver.run()
    assert [stream.tokens for stream in streams] == reference


def test_arriving_staggered(driver: Driver, prompts: list[tuple[int, ...]], reference: list[list[int]]) -> None:
    streams = []
    for prompt in prompts:
        streams.append(driver.admit(prompt, NEW_TOKENS))
        for _ in range(3):
            driver.step()
    driver.run()
    assert [stream.tokens for stream in streams] == reference


def test_in_chunks_of_32(driver: Driver, prompts: list[tuple[int, ...]], reference: list[list[int]]) -> None:
    streams = [driver.admit(prompt, NEW_TOKENS, chunk=32) for prompt in prompts]
    driver.run()
    assert [stream.tokens for stream in streams] == reference


def test_preempted_midway(driver: Driver, prompts: list[tuple[int, ...]], reference: list[list[int]]) -> None:
    streams = [driver.admit(prompt, NEW_TOKENS) for prompt in prompts]
    before: dict[int, list[int]] = {}
    for step in range(48):
        driver.step()
        if step % 2:
            index = step // 2
            before[index] = streams[index].tokens
            streams[index] = driver.preempt(streams[index])
    driver.run()
    assert [before[index] + stream.tokens for index, stream in enumerate(streams)] == reference
