"""Drafts change no text: tokens, log-probabilities and ends are those without, whatever is drafted."""

from __future__ import annotations

import os
import random
from itertools import product
from pathlib import Path

import pytest
import torch
from byte_tokenizer import END, write_tokenizer
from drafted_traffic import AT_ONCE, VOCABULARY, Traffic
from eagle_models import EagleModel
from engine_driver import Driver
from full_grid import full
from native_families import native_configs
from prediction_layers import PredictionLayer
from reference_kernels import reference_engine
from scripted_drafts import DraftsOf, ScriptedDrafts, draft_by
from tiny_transformers import SHAPE, random_model, save
from transformers import Gemma2Config, LlamaConfig, PretrainedConfig

from text_generation_proto.values import (
    EAGLE,
    MTP,
    OWN,
    PREDICTION,
    RECENT,
    Grammar,
    GrammarKind,
    Stopping,
    WarmUpLimits,
)
from text_generation_shard import grammar
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError, NewSequence
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.verification import verifying_rows
from text_generation_shard.engines.torch.sampling.history import TokenHistories
from text_generation_shard.grammar import load_grammars
from text_generation_shard.step.masks import TokenMasks
from text_generation_shard.step.sequence import Sequence, StepRow

FULL_REQUESTS = 10_000
REQUESTS = FULL_REQUESTS if os.environ.get("TEST_FULL") == "1" else 60
SMALLER = SHAPE | {"initializer_range": 0.15}
"""Logits so small that their rounding is below 1e-5."""
TOLERANCES = {"window": 1e-3, "fp8": 1e-3, "qwen3_5_text": 5e-4, "olmo_hybrid": 5e-4, "predictions": 1e-4}
"""Other chunks of a prompt alone change log-probabilities as much."""
OF_TWO_LAYERS = SMALLER | {"num_hidden_layers": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "full": LlamaConfig(**OF_TWO_LAYERS),
    "window": Gemma2Config(**OF_TWO_LAYERS, sliding_window=20, query_pre_attn_scalar=16),
}
STATES = native_configs(SMALLER, head_dim=16, wide_head_dim=24)


def build(folder: Path, *, reference: bool = False, **more: str) -> Engine:
    config = ShardConfig(model_path=str(folder), device="cpu", max_batch_size=8, speculate="8", **more)  # type: ignore[arg-type]
    return reference_engine(config, load_grammars(str(folder), (END,))) if reference else build_engine(config)


CACHES = ("full", "window", "qwen3_5_text", "predictions", "nemotron_h", "lfm2", "falcon_h1", "olmo_hybrid")
OFTEN = {("full", "CPU"), ("full", "device"), ("window", "device"), ("qwen3_5_text", "CPU"), ("predictions", "device")}
"""Caches and operations that `make test` runs, each of both at least once."""


@pytest.fixture(
    scope="module",
    params=[each if each in OFTEN else full(each) for each in product(CACHES, ("CPU", "device"))],
    ids=", ".join,
)
def kinds(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The kind of the cache, and the place of the operations."""
    cache, place = request.param
    return cache, place


@pytest.fixture(scope="module")
def engine(kinds: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    cache, place = kinds
    folder = tmp_path_factory.mktemp("model")
    if cache == "predictions":
        PredictionLayer(STATES["qwen3_next"]).write(folder)
    else:
        save(random_model((CONFIGS | STATES).get(cache, CONFIGS["full"])), folder)
    write_tokenizer(folder)
    dtype = "fp8_e5m2" if cache == "fp8" else "auto"
    return build(folder, reference=place == "device", kv_cache_dtype=dtype)


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=8192, max_batch_prefill_tokens=128)))


def edited(tokens: list[int], draw: random.Random) -> tuple[int, ...]:
    """Return an answer with edits, another text, or none."""
    kept = [token for token in tokens if draw.random() < 0.95]
    changed = [draw.randrange(VOCABULARY) if draw.random() < 0.05 else token for token in kept]
    return draw.choice((tuple(changed), tuple(changed), (7, *changed, *changed), tuple(range(2, 50)), ()))


def with_and_without(driver: Driver, seed: int, kind: str) -> tuple[Traffic, Traffic]:
    """Serve traffic without drafts, and again with some, with predictions and with preemption."""
    plain, drafted = Traffic(seed, kind), Traffic(seed, kind)
    draft_by(driver.engine, None)
    plain.run(driver, preempt=False)
    draw = random.Random(seed)
    drafted.predictions = [edited(plain.tokens(index), draw) for index in range(len(plain.prompts))]
    draft_by(driver.engine, ScriptedDrafts(plain.texts, VOCABULARY, seed))
    drafted.run(driver, preempt=True)
    return plain, drafted


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint with a predicting layer, and one with a draft model, by source."""
    layers = {MTP: PredictionLayer(STATES["qwen2"]), EAGLE: EagleModel(LlamaConfig(**SMALLER))}
    written = {source: layer.write(tmp_path_factory.mktemp(source)) for source, layer in layers.items()}
    for each in written.values():
        write_tokenizer(each)
    return written


@pytest.fixture(
    scope="module",
    params=[
        *((source, True) for source in (PREDICTION, EAGLE)),
        *((source, False) for source in (RECENT, MTP)),
        *(full((source, False)) for source in (OWN, PREDICTION, EAGLE)),
        *(full((source, True)) for source in (OWN, RECENT, MTP)),
    ],
    ids=lambda each: f"{each[0]}, {'device' if each[1] else 'CPU'}",
)
def two_engines(folders: dict[str, Path], request: pytest.FixtureRequest) -> tuple[str, list[Engine]]:
    """A source of drafts, and engines that have it."""
    source, reference = request.param
    folder = folders[MTP if source == MTP else EAGLE]
    more = {} if source == MTP else {"speculator": str(folder / "draft")}
    return source, [build(folder, reference=reference, **more) for _ in range(2)]


@pytest.mark.parametrize("seed", range(-(-REQUESTS // AT_ONCE // 10)))
def test_no_source_changes_anything(two_engines: tuple[str, list[Engine]], seed: int) -> None:
    """Requests are preempted, and moved to another engine. Of the second pass those have answers that are recent outputs."""
    source, engines = two_engines
    drivers = [Driver(each, each.warm_up(WarmUpLimits(max_batch_total_tokens=4096))) for each in engines]
    for driver in drivers:
        draft_by(driver.engine, None)
    plain = Traffic(seed, "any")
    plain.run(drivers[0], preempt=False)
    draw, accepted = random.Random(seed), 0
    for driver in drivers:
        draft_by(driver.engine, DraftsOf(source, plain.texts, VOCABULARY, seed))
    for _ in range(2 if source == RECENT else 1):
        drafted = Traffic(seed, "any")
        if source == PREDICTION:
            drafted.predictions = [edited(plain.tokens(index), draw) for index in range(len(plain.prompts))]
        drafted.run(*drivers, preempt=True)
        drafted.check_equal(plain, 1e-5)
        accepted += drafted.accepted[source]
        assert [*drafted.accepted] in ([source], [])
    assert accepted > 0 or seed  # not every few texts repeat themselves


@pytest.mark.parametrize("kind", ["any", full("greedy")])
@pytest.mark.parametrize("seed", range(-(-REQUESTS // AT_ONCE // 12)))
def test_drafts_change_nothing(driver: Driver, kinds: tuple[str, str], kind: str, seed: int) -> None:
    plain, drafted = with_and_without(driver, seed, kind)
    drafted.check_equal(plain, TOLERANCES.get(kinds[0], 1e-5))
    assert drafted.accepted[OWN] > 10 or seed  # not every few texts repeat themselves
    assert drafted.accepted[PREDICTION] > 0 or seed or kind == "greedy"


@pytest.mark.full
@pytest.mark.parametrize("kinds", [("fp8", "CPU"), ("fp8", "device")], indirect=True)
def test_drafts_change_nothing_that_rounding_to_fp8_does_not(driver: Driver, kinds: tuple[str, str]) -> None:
    plain, drafted = with_and_without(driver, 0, "any")
    drafted.check_equal(plain, TOLERANCES[kinds[0]])


def test_slow_masks_of_drafts_count_as_those_of_their_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = write_tokenizer(tmp_path).token_to_id("a")
    grammars = load_grammars(str(tmp_path), (END,))
    assert grammars is not None
    matcher = grammars.build(Grammar(GrammarKind.REGEX, "a*")).result()
    matcher.beside = None
    sequence = Sequence.of(NewSequence(0, (5,), Stopping(max_new_tokens=9)))
    sequence.matcher = matcher
    row = StepRow(sequence, 0, 3, True, drafts=(a, a))
    times = iter((0.0, 0.0001, 1.0, 1.0001, 2.0, 2.01))  # the mask behind the last draft is slow
    monkeypatch.setattr(grammar.time, "thread_time", lambda: next(times))
    _, found = verifying_rows(row, TokenHistories(torch.device("cpu")), TokenMasks(grammars, 300), 300)
    assert [mask is not None and mask.failure for mask in found] == [None] * 3
    assert not matcher.is_quick
    assert matcher.problem is None


@pytest.mark.parametrize(
    ("speculate", "tokens", "problem"),
    [("3", 4.5, "1 to 4 tokens"), ("3", float("inf"), "1 to 4 tokens"), ("3", 0.5, "1 to 4"), ("0", 2.6, "1 token, ")],
)
def test_a_step_cannot_yield_more_tokens_than_it_computes(
    speculate: str, tokens: float, problem: str, tmp_path: Path
) -> None:
    save(random_model(CONFIGS["full"]), tmp_path)
    config = ShardConfig(model_path=str(tmp_path), device="cpu", speculate=speculate, synthetic_acceptance=tokens)
    with pytest.raises(EngineError, match=f"--synthetic-acceptance {tokens:g}: a step yields {problem}"):
        build_engine(config)
