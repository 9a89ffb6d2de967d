"""In float32 the real model gives the same tokens with cached prefixes as without, and does not change the cached blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_driver import Driver, Stream

from text_generation_proto.values import Sampling, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine import TorchEngine

pytestmark = pytest.mark.model

NEW_TOKENS = 32
SHARED_TOKENS = 320
USERS = 4
SAMPLINGS = [
    Sampling(),
    Sampling(greedy=False, temperature=0.9, top_p=0.95, seed=41),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.5),
]


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> TorchEngine:
    return build_engine(ShardConfig(model_path=str(demo_model), dtype="float32", device="cpu", max_batch_size=16))


@pytest.fixture
def driver(engine: TorchEngine) -> Driver:
    limits = WarmUpLimits(max_batch_total_tokens=16384, max_batch_prefill_tokens=64, max_batch_size=1)
    driver = Driver(engine, engine.warm_up(limits))
    # A read of a position that was not written gives NaN.
    engine._executor._cache._pool.fill_(torch.nan)
    return driver


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded", "penalized"])
def test_users_of_one_system_prompt(driver: Driver, prompts: list[tuple[int, ...]], sampling: Sampling) -> None:
    system = prompts[21][:SHARED_TOKENS]
    turns = [(*system, *prompts[10 + user]) for user in range(USERS)]
    expected = []
    for turn in turns:
        stream = driver.admit(turn, NEW_TOKENS, sampling=sampling)
        driver.run()
        expected.append(stream.tokens)

    # The first sequence computes the prefix; the others start while it runs and share its blocks.
    blocks = SHARED_TOKENS // 16
    streams: list[Stream] = [driver.admit(turns[0], NEW_TOKENS, sampling=sampling)]
    driver.step()
    shared = streams[0].blocks[:blocks]
    assert isinstance(driver.engine, TorchEngine)
    pool = driver.engine._executor._cache._pool
    before = pool[:, shared].clone()
    for turn in turns[1:]:
        streams.append(driver.admit(turn, NEW_TOKENS, sampling=sampling, shared=shared, computed_tokens=SHARED_TOKENS))
        result = driver.step()
        assert result is not None
        assert result.prefilled == [(streams[-1].slot, len(turn) - SHARED_TOKENS)]
    driver.run()
    assert [stream.tokens for stream in streams] == expected
    assert torch.equal(pool[:, shared], before)


def test_the_next_turn_reuses_what_was_generated(driver: Driver, prompts: list[tuple[int, ...]]) -> None:
    first = driver.admit(prompts[16], 60)
    driver.run()
    turn = (*prompts[16], *first.tokens, *prompts[5])
    alone = driver.admit(turn, NEW_TOKENS)
    driver.run()
    # The last generated token was not computed.
    blocks = (len(prompts[16]) + 59) // 16
    second = driver.admit(turn, NEW_TOKENS, shared=first.blocks[:blocks], computed_tokens=16 * blocks)
    driver.run()
    assert second.tokens == alone.tokens
