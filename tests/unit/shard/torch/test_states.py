"""States as cache: a sequence that continues from a checkpoint gives the same results as one that computes its whole prompt.

States of blocks that no sequence should read are NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from engine_driver import Driver, Stream
from full_grid import full
from native_families import native_configs
from reference_kernels import reference_engine
from tiny_transformers import SHAPE, random_model, save

from text_generation_proto.values import Sampling, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError, NewSequence, Orders
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.tensorrt_llm.build import read_model
from text_generation_shard.engines.torch.engine.engine import TorchEngine

KINDS = {
    "delta net": "qwen3_5_text",
    "Mamba 2": "nemotron_h",
    "both kinds of attention": "falcon_h1",
    "convolution": "lfm2",
    "delta net of OLMo": "olmo_hybrid",
}
CONFIGS = native_configs(SHAPE | {"max_position_embeddings": 256}, head_dim=16, wide_head_dim=24)
PROMPT = tuple((37 * i + 11) % 331 for i in range(130))
FORKS = [(*PROMPT[:length], 5, length % 7, 9) for length in (16, 32, 48, 64, 80, 96, 112, 128)]
NEW = 12
SEEDED = Sampling(greedy=False, temperature=1.3, top_k=80, seed=23)


@pytest.fixture(
    scope="module",
    params=[
        *((build_engine, kind) for kind in KINDS),
        (reference_engine, "delta net"),
        full((reference_engine, "Mamba 2")),
        full((reference_engine, "convolution")),
        full((reference_engine, "delta net of OLMo")),
    ],
    ids=lambda param: f"{param[1]}, {'CPU' if param[0] is build_engine else 'device'}",
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    build: Callable[[ShardConfig], Engine]
    build, kind = request.param
    folder = save(random_model(CONFIGS[KINDS[kind]]), tmp_path_factory.mktemp("checkpoint"))
    return build(ShardConfig(model_path=folder, device="cpu", max_batch_size=12, dtype="float32"))


@pytest.fixture
def driver(engine: TorchEngine) -> Driver:
    groups = engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=128))
    fill_states(engine, torch.nan)
    return Driver(engine, groups)


@torch.inference_mode()
def fill_states(engine: TorchEngine, value: float) -> None:
    for layer in engine._executor._runner._model._weights.layers:
        for pool in () if layer.states is None else (layer.states._history, layer.states._states):
            pool.fill_(value)


def with_checkpoints(driver: Driver, prompt: tuple[int, ...], every: int, chunk: int) -> tuple[Stream, dict[int, int]]:
    """Compute a prompt, and keep its state after each `every` tokens; return its stream and the blocks by position."""
    stream = driver.admit(prompt, NEW, chunk=chunk)
    kept = {position: driver.keep_state(stream, position) for position in range(every, len(prompt), every)}
    driver.run()
    return stream, kept


def same(stream: Stream, expected: Stream) -> None:
    assert stream.tokens == expected.tokens
    # Of logits up to 10: a relative error of 5e-6.
    assert stream.logprobs == pytest.approx(expected.logprobs, abs=5e-5)


def test_every_checkpoint_continues_as_if_nothing_was_cached(driver: Driver) -> None:
    """Every other sequence is sampled. Checkpoints are left at the ends of chunks, and within them."""
    samplings = [SEEDED if number % 2 else Sampling() for number in range(len(FORKS))]
    expected = []
    for prompt, sampling in zip(FORKS, samplings, strict=True):
        expected.append(driver.admit(prompt, NEW, sampling=sampling))
        driver.run()
    owner, kept = with_checkpoints(driver, PROMPT, 16, chunk=23)
    # All at once, in other chunks, each from its own checkpoint; the last two are preempted later.
    streams = []
    for number, (prompt, position) in enumerate(zip(FORKS, kept, strict=True)):
        shared = owner.blocks[: position // 16]
        for chunk in (1 << 30, 2)[: 1 + number % 2]:
            streams.append(
                (
                    driver.admit(
                        prompt,
                        NEW,
                        sampling=samplings[number],
                        chunk=chunk,
                        shared=shared,
                        computed_tokens=position,
                        checkpoint=kept[position],
                    ),
                    number,
                )
            )
            driver.step()
    *others, (last, number) = streams
    resumed = driver.preempt(last, shared=owner.blocks[:8], computed_tokens=128, checkpoint=kept[128])
    driver.run()
    for stream, each in others:
        same(stream, expected[each])
    assert last.tokens + resumed.tokens == expected[number].tokens
    # Again: no checkpoint has changed.
    again = driver.admit(
        FORKS[2], NEW, sampling=samplings[2], shared=owner.blocks[:3], computed_tokens=48, checkpoint=kept[48]
    )
    driver.run()
    same(again, expected[2])


def test_orders_that_break_the_rules_of_states_are_refused_alone(driver: Driver) -> None:
    stream = driver.admit(PROMPT, NEW, chunk=64)
    driver.step()
    template = {"slot": 9, "prompt": (1, 2, 3), "stopping": stream.stopping, "blocks": (1,)}
    for problem, changes in {
        "own state": {"further_blocks": ((0, ()),)},
        "continues from": {"further_blocks": ((0, (1,)),), "computed_tokens": 1},
        "it has its own state,": {"further_blocks": ((0, (1, 2)),)},
        "is not one of": {"further_blocks": ((0, (9999,)),)},
        "groups": {},
    }.items():
        (failure,) = driver.engine.apply(Orders(2, placements=(NewSequence(**template, **changes),)))
        assert problem in failure.message
    while stream.to_prefill:
        driver.step()
    (failure,) = driver.engine.apply(Orders(3, further_allocations=(((stream.slot, (len(PROMPT) // 16 * 16, 3)),),)))
    assert "of an added state" in failure.message


@pytest.mark.parametrize(
    ("named", "flag", "expected"),
    [(None, "auto", torch.float32), ("bfloat16", "auto", torch.bfloat16), ("bfloat16", "float16", torch.float16)],
)
def test_states_are_kept_in_the_type_of_the_flag_the_checkpoint_or_the_model(
    named: str | None, flag: Literal["auto", "float16"], expected: torch.dtype, tmp_path: Path
) -> None:
    folder = Path(save(random_model(CONFIGS["qwen3_5_text"]), tmp_path))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"mamba_ssm_dtype": named}))
    model = ShardConfig(
        model_path=str(folder), device="cpu", max_batch_size=2, dtype="float32", mamba_ssm_cache_dtype=flag
    )
    engine = build_engine(model)
    groups = engine.warm_up(WarmUpLimits(max_batch_total_tokens=512))
    driver = Driver(engine, groups)
    driver.admit(PROMPT, 3)
    driver.run()
    states = [layer.states for layer in engine._executor._runner._model._weights.layers if layer.states is not None]
    assert {state._states.dtype for state in states} == {expected}


def test_unknown_types_of_states_and_engines_without_a_choice_are_refused(tmp_path: Path) -> None:
    folder = Path(save(random_model(CONFIGS["qwen3_5_text"]), tmp_path))
    asked = ShardConfig(model_path=str(folder), device="cpu", mamba_ssm_cache_dtype="float32")
    with pytest.raises(EngineError, match="only the native decoder has it; --model-impl transformers"):
        build_engine(asked.model_copy(update={"model_impl": "transformers"}))
    with pytest.raises(EngineError, match="mamba_ssm_cache_dtype in kv_cache_config of --trtllm-options"):
        read_model(asked)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"mamba_ssm_dtype": "int8"}))
    with pytest.raises(EngineError, match="mamba_ssm_dtype is 'int8', not float32, bfloat16, float16"):
        build_engine(ShardConfig(model_path=str(folder), device="cpu", model_impl="native"))
