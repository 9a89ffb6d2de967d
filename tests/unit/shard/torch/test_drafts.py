"""Drafts change no text: tokens, log-probabilities and ends are those without, whatever is drafted."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from byte_tokenizer import END, write_tokenizer
from engine_driver import Driver, Stream
from full_grid import full
from native_families import native_configs
from prediction_layers import PredictionLayer
from reference_kernels import reference_engine
from scripted_drafts import ScriptedDrafts, draft_by
from tiny_transformers import SHAPE, random_model, save
from transformers import Gemma2Config, LlamaConfig, PretrainedConfig

from text_generation_proto.values import OWN, PREDICTION, Grammar, GrammarKind, Sampling, Stopping, WarmUpLimits
from text_generation_shard import grammar
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, NewSequence, TopTokens
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.verification import verifying_rows
from text_generation_shard.engines.torch.sampling.history import TokenHistories
from text_generation_shard.grammar import load_grammars
from text_generation_shard.step.masks import TokenMasks
from text_generation_shard.step.sequence import Sequence, StepRow

FULL_REQUESTS = 10_000
REQUESTS = FULL_REQUESTS if os.environ.get("TEST_FULL") == "1" else 60
AT_ONCE = 24
VOCABULARY = SHAPE["vocab_size"]
GRAMMARS = [
    Grammar(GrammarKind.REGEX, r"(abc|[0-9]{2,5}-x){1,4}"),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 6})),
]
SMALLER = SHAPE | {"initializer_range": 0.15}
"""Logits so small that their rounding is below 1e-5."""
TOLERANCES = {"window": 1e-3, "fp8": 1e-3, "qwen3_5_text": 1e-4, "predictions": 1e-4}
"""Other chunks of a prompt alone change log-probabilities as much."""
CONFIGS: dict[str, PretrainedConfig] = {
    "full": LlamaConfig(**SMALLER),
    "window": Gemma2Config(**SMALLER, sliding_window=20, query_pre_attn_scalar=16),
}
STATES = native_configs(SMALLER, head_dim=16, wide_head_dim=24)


@dataclass
class Traffic:
    """Random requests, and for each the streams that serve it: several if it is preempted."""

    seed: int
    kind: str
    """"greedy": nothing but the most probable tokens."""
    requests: list[dict[str, object]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    served: list[list[Stream]] = field(default_factory=list)
    predictions: list[tuple[int, ...]] = field(default_factory=list)
    """The predictions of the requests, in order; empty: none has one."""
    accepted: Counter[str] = field(default_factory=Counter)
    """Drafted tokens that were right, by source."""

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        while len(self.requests) < AT_ONCE:
            prompt = [draw.randrange(2, VOCABULARY) for _ in range(draw.choice((1, 5, 16, 40)))] * draw.choice((1, 2))
            several = draw.choice((1, 1, 4))  # the choices of one request
            request = self._request(draw)
            for number in range(several):
                self.prompts.append(prompt)
                sampling = request["sampling"]
                assert isinstance(sampling, Sampling)
                self.requests.append(request | {"sampling": replace(sampling, seed=draw.randrange(1 << 40) + number)})

    def _request(self, draw: random.Random) -> dict[str, object]:
        new = draw.choice((1, 2, 9, 30, 60))
        ends = frozenset({END, *draw.sample(range(VOCABULARY), draw.choice((0, 0, 8)))})
        words = ((40,), (50, 51), tuple(range(60, 63)))
        sampling = Sampling(
            greedy=draw.random() < 0.5,
            temperature=draw.choice((1.0, 0.6)),
            top_k=draw.choice((0, 0, 20)),
            top_p=draw.choice((1.0, 1.0, 0.9)),
            min_p=draw.choice((0.0, 0.0, 0.02)),
            typical_p=draw.choice((1.0, 1.0, 0.95)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.3)),
            frequency_penalty=draw.choice((0.0, 0.0, 0.3)),
            output_frequency_penalty=draw.choice((0.0, 0.0, 0.4)),
            output_presence_penalty=draw.choice((0.0, 0.0, -0.5)),
            watermark=draw.random() < 0.25,
            logit_bias_ids=draw.choice(((), (), (70, 71))),
            logit_bias_values=(),
            bad_words=draw.choice(((), (), words)),
            allowed_token_ids=draw.choice(((), (), (), tuple(range(30, 250)))),
        )
        if sampling.logit_bias_ids:
            sampling = replace(sampling, logit_bias_values=(3.0, -2.0))
        if self.kind == "greedy":
            return {"sampling": Sampling(), "stopping": Stopping(new, ends, min_new_tokens=min(2, new - 1))}
        if draw.random() < 0.3:
            sampling = Sampling(greedy=sampling.greedy)
        grammar = draw.choice((None, None, None, *GRAMMARS))
        return {
            "sampling": sampling,
            "stopping": Stopping(new, ends, frozenset({5}), min(draw.choice((0, 0, 4)), new - 1)),
            "top_n": draw.choice((0, 0, 3)),
            "prompt_logprobs": draw.random() < 0.2,
            "chunk": draw.choice((7, 16, 100)),
            "grammar": grammar,
        }

    def run(self, driver: Driver, *, preempt: bool) -> None:
        """Serve the requests; with `preempt`, interrupt some, and continue them with their tokens in the prompt."""
        draw = random.Random(self.seed)
        for request, prediction in zip(self.requests, self.predictions, strict=False):
            request["prediction"] = prediction
        left = list(zip(self.prompts, self.requests, strict=True))[::-1]
        while left or driver.streams:
            while left and len(driver.streams) < 6:
                prompt, request = left.pop()
                self.served.append([driver.admit(prompt, **request)])  # type: ignore[arg-type]
                if draw.random() < 0.5:
                    break
            for parts in self.served if preempt and draw.random() < 0.3 else ():
                if (
                    len(parts) == 1
                    and parts[0].tokens
                    and not parts[0].is_over
                    and not parts[0].stopping.min_new_tokens
                ):
                    index = self.served.index(parts)
                    request = self.requests[index]
                    options = {"top_n": request.get("top_n", 0), "prediction": request.get("prediction", ())}
                    parts.append(driver.preempt(parts[-1], **options))
                    break
            if (result := driver.step()) is None and not left:
                break
            if result is not None:
                self.accepted.update({told.source: told.accepted_tokens for told in result.drafting})

    def tokens(self, index: int) -> list[int]:
        return [token for part in self.served[index] for token in part.tokens]

    @property
    def texts(self) -> list[list[int]]:
        return [[*prompt, *self.tokens(index)] for index, prompt in enumerate(self.prompts)]

    def check_equal(self, other: Traffic, tolerance: float) -> None:
        """Raise AssertionError unless the other one was served the same."""
        for index, (mine, its) in enumerate(zip(self.served, other.served, strict=True)):
            assert self.tokens(index) == other.tokens(index), self.requests[index]
            assert mine[-1].finish == its[-1].finish
            failures = [
                stream.failure and (stream.failure.code, stream.failure.message) for stream in (mine[-1], its[-1])
            ]
            assert failures[0] == failures[1]
            for name in ("logprobs", "prompt_logprobs", "top_tokens"):
                values, expected = (_numbers([getattr(part, name) for part in parts]) for parts in (mine, its))
                equal = pytest.approx(expected, abs=tolerance, rel=tolerance, nan_ok=True)
                assert values == equal or self._tied(index, name, values, expected, max(tolerance, 1e-4)), name

    def _tied(self, index: int, name: str, values: list[float], expected: list[float], near: float) -> bool:
        """Return True if at one position only tokens may have tied at the last place of a cut: after rounding both are kept, or one."""
        sampling, top_n = self.requests[index]["sampling"], self.requests[index].get("top_n", 0)
        assert isinstance(sampling, Sampling)
        differ = sum(abs(each - its) > near for each, its in zip(values, expected, strict=True))
        return sampling.cuts and differ == {"logprobs": 1, "top_tokens": top_n}.get(name)


def _numbers(values: object) -> list[float]:
    """Return the numbers in nested lists, in order; top tokens without their places in steps."""
    if isinstance(values, TopTokens):
        return _numbers((values.token_ids, values.logprobs))
    if isinstance(values, (list, tuple)):
        return [number for value in values for number in _numbers(value)]
    assert isinstance(values, (int, float))
    return [values]


Build = Callable[[Path], Engine]


def build(folder: Path, *, reference: bool = False, kv_cache_dtype: str = "auto") -> Engine:
    config = ShardConfig(
        model_path=str(folder), device="cpu", max_batch_size=8, speculate="8", kv_cache_dtype=kv_cache_dtype
    )
    return reference_engine(config, load_grammars(str(folder), (END,))) if reference else build_engine(config)


@pytest.fixture(
    scope="module",
    params=[
        "full",
        "window",
        "fp8",
        "qwen3_5_text",
        "nemotron_h",
        "lfm2",
        "predictions",
        full("falcon_h1"),
        full("olmo_hybrid"),
    ],
)
def cache(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module", params=["CPU", "device"])
def engine(cache: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    if cache == "predictions":
        PredictionLayer(STATES["qwen3_next"]).write(folder)
    else:
        save(random_model((CONFIGS | STATES).get(cache, CONFIGS["full"])), folder)
    write_tokenizer(folder)
    dtype = "fp8_e5m2" if cache == "fp8" else "auto"
    return build(folder, reference=request.param == "device", kv_cache_dtype=dtype)


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=128)))


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


@pytest.mark.parametrize("kind", ["greedy", "any"])
@pytest.mark.parametrize("seed", range(-(-REQUESTS // AT_ONCE // 12)))
def test_drafts_change_nothing(driver: Driver, cache: str, kind: str, seed: int) -> None:
    plain, drafted = with_and_without(driver, seed, kind)
    drafted.check_equal(plain, TOLERANCES.get(cache, 1e-5))
    assert drafted.accepted[OWN] > 10
    assert drafted.accepted[PREDICTION] > 0 or kind == "greedy"


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
