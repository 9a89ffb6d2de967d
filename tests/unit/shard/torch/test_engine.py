"""The torch engine: refusals, memory limits, invalid numbers, failed steps."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver
from poisoned_checkpoint import POISON, write_poisoned_checkpoint

from text_generation_proto.values import FailureCode, Sampling, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, InsufficientMemory
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.layers.linear import has_products

PROMPT = tuple(range(5, 38))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_poisoned_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> TorchEngine:
    return build_engine(ShardConfig(model_path=str(checkpoint), device="cpu", max_batch_size=8))


@pytest.fixture
def driver(engine: TorchEngine) -> Driver:
    # Few blocks, so that they are reused at once.
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=1024)))


def test_info_matches_the_config(engine: TorchEngine, checkpoint: Path) -> None:
    info = engine.info
    assert (info.engine, info.model_type, info.dtype, info.device) == ("torch", "llama", "float32", "cpu")
    assert (info.vocab_size, info.max_sequence_length, info.max_slots, info.block_size) == (200, 600, 8, 16)
    assert info.model_id == str(checkpoint)
    assert info.eos_token_ids == (2,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cpu_without_products_of_the_checkpoint_computes_in_float32(
    checkpoint: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    name, path = str(dtype).removeprefix("torch."), tmp_path / "config.json"
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": name}))
    default, given = (
        build_engine(ShardConfig(model_path=str(tmp_path), device="cpu", dtype=each)) for each in (None, name)
    )
    assert (default.info.dtype, given.info.dtype) == (name if has_products(dtype) else "float32", name)
    driver = Driver(default, default.warm_up(WarmUpLimits(max_batch_total_tokens=1024)))
    stream = driver.admit(PROMPT, 3)
    driver.run()
    assert len(stream.tokens) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_path": ""}, "needs model_path"),
        ({"model_path": "/nowhere"}, "does not exist"),
        ({"device": "toaster"}, "'toaster' is not one of"),
        ({"device": "meta"}, "'meta' is not one of"),
        ({"device": "cuda:77"}, "'cuda:77' is not available"),
    ],
)
def test_invalid_settings_are_refused(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    config = ShardConfig(**{"model_path": str(checkpoint), **changes})
    with pytest.raises(EngineError, match=message):
        build_engine(config)


def test_a_kv_cache_that_does_not_fit_is_refused_with_the_numbers(engine: TorchEngine) -> None:
    with pytest.raises(InsufficientMemory, match=r"^8796093022208 tokens of KV cache take 2097152\.00 GiB, .* left"):
        engine.warm_up(WarmUpLimits(max_batch_total_tokens=1 << 43))


def test_too_little_memory_for_one_block_is_refused(checkpoint: Path) -> None:
    engine = build_engine(ShardConfig(model_path=str(checkpoint), device="cpu", cpu_memory_fraction=1e-6))
    with pytest.raises(InsufficientMemory, match="room for 0 tokens"):
        engine.warm_up(WarmUpLimits())


def test_the_kv_cache_is_not_larger_than_all_slots_need(engine: TorchEngine) -> None:
    assert engine.warm_up(WarmUpLimits())[0].num_blocks == 8 * (600 // 16 + 1)


def test_a_closed_engine_has_dropped_everything(checkpoint: Path) -> None:
    engine = build_engine(ShardConfig(model_path=str(checkpoint), device="cpu"))
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=256)))
    driver.admit(PROMPT)
    driver.step()
    engine.close()
    assert (engine.running, engine.used_blocks) == (0, 0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(greedy=False, top_p=0.9)], ids=["greedy", "sampled"])
def test_nan_logits_fail_only_their_sequence(driver: Driver, sampling: Sampling) -> None:
    expected = driver.alone(PROMPT)
    bad, neighbour = driver.admit([*PROMPT[:-1], POISON], sampling=sampling), driver.admit(PROMPT)
    driver.run()
    assert bad.failure is not None
    assert (bad.failure.code, bad.tokens) == (FailureCode.NUMERICS, [])
    assert neighbour.tokens == expected


@pytest.mark.parametrize("length", [1, 16, 17, 40])
def test_blocks_that_held_nan_can_be_reused(driver: Driver, length: int) -> None:
    expected = driver.alone(PROMPT[:length], 20)
    poisoned = driver.admit((POISON,) * 550, 1)
    driver.step()
    assert poisoned.failure is not None
    # Of different lengths, so that the shorter one is padded.
    after, longer = driver.admit(PROMPT[:length], 20), driver.admit([*PROMPT] * 4, 20)
    driver.run()
    assert after.tokens == expected
    assert longer.failure is None


def test_a_step_that_raises_fails_only_its_sequences(driver: Driver) -> None:
    expected = driver.alone(PROMPT)
    waiting = driver.admit(PROMPT, allocated=48, chunk=33)
    driver.streams[waiting.slot].to_prefill = 0
    # No seed that the wire can carry makes a step raise; this one does.
    broken = driver.admit(PROMPT, sampling=Sampling(greedy=False, seed=1 << 80))
    neighbour = driver.admit(PROMPT)
    driver.step()
    for stream in (broken, neighbour):
        assert stream.failure is not None
        assert stream.failure.code is FailureCode.STEP
        # NumPy 1 warns where NumPy 2 raises, and a warning is an error here.
        assert stream.failure.message.startswith(("the step failed: OverflowError", "the step failed: Deprecation"))
        assert "\n" not in stream.failure.message
    assert driver.engine.running == 1
    waiting.to_prefill = len(PROMPT)
    driver.run()
    assert waiting.tokens == expected


def test_only_allowed_tokens_are_chosen_and_no_bad_word_is_completed(driver: Driver) -> None:
    free = driver.admit(PROMPT, 12)
    driver.run()
    banned = (free.tokens[1], free.tokens[2])
    streams = {
        "allowed": driver.admit(PROMPT, 12, sampling=Sampling(allowed_token_ids=(33, 34))),
        "one": driver.admit(PROMPT, 12, sampling=Sampling(bad_words=((free.tokens[0],),))),
        "two": driver.admit(PROMPT, 12, sampling=Sampling(bad_words=(banned, (*PROMPT[-1:], free.tokens[0])))),
        "free": driver.admit(PROMPT, 12),
    }
    driver.run()
    assert {*streams["allowed"].tokens} <= {33, 34}
    assert free.tokens[0] not in streams["one"].tokens
    # Words are compared with the output alone: one that begins in the prompt is free.
    assert streams["two"].tokens[:2] == free.tokens[:2]
    assert banned not in set(pairwise(streams["two"].tokens))
    assert streams["free"].tokens == free.tokens
    # A sequence that goes on after a preemption counts its earlier tokens as output.
    moved = driver.admit((*PROMPT, *free.tokens[:2]), 3, sampling=Sampling(bad_words=(banned,)), generated_tokens=2)
    driver.run()
    assert moved.tokens[0] != free.tokens[2]
