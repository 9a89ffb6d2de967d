"""Where the engine is easily wrong about itself: between two moments, at the edge of its pool, with settings that are none."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from model_folders import ENGINE, RANKS, fill
from self_driver import SelfDriver
from standin import VERSIONS, importable, model_folder, read_log

from text_generation_proto.values import FailureCode, FinishReason, Grammar, GrammarKind, Sampling, Stopping
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, NewSequence, Orders, WarmUpLimits
from text_generation_shard.engines.tensorrt_llm.build import build
from text_generation_shard.engines.tensorrt_llm.engine import EngineBroken, TensorRTEngine
from text_generation_shard.engines.tensorrt_llm.statistics import Statistics
from text_generation_shard.engines.tensorrt_llm.watchdog import Progress, Watchdog

PROMPT = tuple(range(100, 120))

Build = Callable[..., TensorRTEngine]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def built(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> Build:
    """Builds engines, warmed up; `settings` are the stand-in's."""
    folder = model_folder(tmp_path / "model")

    def make(*, options: str = "", hang_timeout: float = 60.0, **settings: object) -> TensorRTEngine:
        stack.enter_context(importable(version, monkeypatch, **settings))
        config = ShardConfig(
            engine="tensorrt-llm", model_path=str(folder), trtllm_options=options, hang_timeout=hang_timeout
        )
        engine = build(config)
        stack.callback(engine.close)
        engine.warm_up(WarmUpLimits())
        return engine

    return make


# -------------------------------------------------------------------------------------------------------------- verdicts


def test_a_request_that_comes_after_hours_of_silence_is_no_hang(built: Build) -> None:
    """The watchdog may look in any moment of an admission."""
    engine = built()
    long_ago = time.monotonic() - 36_000
    engine._began_at = engine._driver.heard_at = engine._statistics.progressed_at = long_ago
    verdicts = []

    class Held(dict[int, Any]):
        def __setitem__(self, slot: int, stream: object) -> None:
            super().__setitem__(slot, stream)
            verdicts.append(engine._watchdog._look())

    engine._held = Held()
    engine.apply(Orders(1, admit=(NewSequence(0, PROMPT, Stopping(3)),)))
    assert verdicts == [None]


def test_requests_that_keep_coming_are_no_sign_of_life(built: Build) -> None:
    engine = built(hang_step_token=777, hang_timeout=2.5)
    engine.apply(Orders(1, admit=(NewSequence(0, (5, 777), Stopping(5)),)))
    with pytest.raises(EngineBroken, match="has brought nothing"):
        for slot in range(1, 20):  # a step waits for a second
            engine.apply(Orders(slot + 1, admit=(NewSequence(slot, PROMPT, Stopping(5)),)))
            engine.step()


def test_nobody_waits_for_a_token_of_an_engine_that_is_known_to_be_broken(built: Build) -> None:
    engine = built(hang_step_token=777)
    arguments = engine._parameters.arguments(NewSequence(0, (5, 777), Stopping(5)))
    assert engine._driver.prove(arguments, 3600, lambda: "its worker died") == "its worker died"
    assert "did not come within" in str(engine._driver.prove(arguments, 0.01, lambda: None))
    engine._break("it hangs")  # or closing it would wait for it


def test_an_engine_that_cannot_be_asked_for_its_health_has_none() -> None:
    def ask() -> bool:
        raise ConnectionError("no answer")

    told: list[str] = []
    watchdog = Watchdog(ask, lambda: Progress(0, 0, 0.0), 60.0, told.append)
    watchdog.start()
    watchdog._thread.join(30)
    assert told == ["the engine does not say whether it is healthy: ConnectionError: no answer"]


async def test_figures_that_make_no_sense_end_nothing() -> None:
    class Library:
        entries: list[Any] = []  # noqa: RUF012 - set below

        async def get_stats_async(self, timeout: float) -> AsyncIterator[Mapping[str, Any]]:
            for entry in self.entries:
                if isinstance(entry, Exception):
                    raise entry
                yield entry

    library = Library()
    statistics = Statistics(library)  # type: ignore[arg-type]  # the one method that it uses
    library.entries = [{"iter": 1, "kvCacheStats": {"usedNumBlocks": "many"}}]
    await statistics.look()
    library.entries = [{"iter": 2, "kvCacheStats": {"usedNumBlocks": 7}}, TimeoutError()]
    await statistics.look()
    assert statistics.used_blocks == 7


# ------------------------------------------------------------------------------------------------------------------ pool


def test_what_fills_the_pool_to_the_last_token_runs_and_no_more_is_let_in(built: Build) -> None:
    driver = SelfDriver(built(options="kv_cache_config: {max_tokens: 1024}"))
    fits = driver.admit(PROMPT, 1024 - len(PROMPT))
    driver.run()
    assert (len(fits.tokens), fits.finish) == (1024 - len(PROMPT), FinishReason.LENGTH)
    over = driver.admit(PROMPT, 1024 - len(PROMPT) + 1)
    driver.run()
    assert over.failure is not None
    assert over.failure.code is FailureCode.INVALID
    assert "1024 tokens" in over.failure.message


def test_a_pool_smaller_than_a_block_is_not_taken_for_no_limit(built: Build) -> None:
    assert built().warm_up(WarmUpLimits(max_batch_total_tokens=16)) == 0


def test_blocks_in_use_are_counted_in_the_blocks_that_were_told(built: Build) -> None:
    """Some attention kernels take a block size of their own."""
    engine = built()
    engine._statistics.used_blocks, engine._statistics.block_size = 3, 2 * engine.info.block_size
    assert engine.used_blocks == 6


# ------------------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    ("sampling", "arrives"),
    [
        (Sampling(greedy=False, temperature=0.7), {"temperature": 0.7, "top_p": 1.0}),
        (Sampling(greedy=False, top_k=5, top_p=0.5), {"temperature": 1.0, "top_k": 5, "top_p": 0.5}),
        (Sampling(greedy=False, top_k=2**31), {"temperature": 1.0, "top_p": 1.0}),
    ],
    ids=["nothing cut off", "both", "more than there are"],
)
def test_sampling_is_sampling_for_every_sampler(built: Build, sampling: Sampling, arrives: dict[str, object]) -> None:
    """The C++ sampler is greedy where neither top_k nor top_p is said."""
    sent = built()._parameters.sampling(NewSequence(0, PROMPT, Stopping(3), sampling))
    assert {name: sent[name] for name in ("temperature", "top_k", "top_p") if name in sent} == arrives


def test_an_empty_grammar_is_not_none(built: Build) -> None:
    admission = NewSequence(0, PROMPT, Stopping(3), grammar=Grammar(GrammarKind.REGEX, ""))
    assert built()._parameters.problem(admission) == "the grammar is empty"


def test_scores_of_a_prompt_whose_start_was_not_computed_belong_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    stack.enter_context(importable("1.3", monkeypatch))  # the one that scores prompts
    engine = build(ShardConfig(engine="tensorrt-llm", model_path=str(model_folder(tmp_path / "model"))))
    stack.callback(engine.close)
    engine.warm_up(WarmUpLimits())
    driver = SelfDriver(engine)
    prompt = tuple(range(100, 180))
    driver.admit(prompt, 2, cache_salt="scored-0")  # whoever guesses ours
    driver.run()
    scored = driver.admit(prompt, 2, prompt_logprobs=True)
    driver.run()
    (scores,) = scored.prompt_logprobs
    assert len(scores) == len(prompt)
    assert math.isnan(scores[1])
    assert not any(math.isnan(score) for score in scores[-10:])


# --------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("kv_cache_config: {tokens_per_block: abc}", "tokens_per_block must be a whole number above 0, not 'abc'"),
        ("kv_cache_config: {tokens_per_block: null}", "tokens_per_block must be a whole number above 0, not None"),
        ("kv_cache_config: []", "kv_cache_config must be a mapping"),
        ("max_batch_size: 0", "max_batch_size must be a whole number above 0, not 0"),
    ],
)
def test_an_option_of_the_wrong_kind_is_one_line(built: Build, options: str, problem: str) -> None:
    with pytest.raises(EngineError) as caught:
        built(options=options)
    assert str(caught.value) == f"--trtllm-options: {problem}"


class Compiled:
    """Builds engines of a compiled folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        self.log = folder / "log"
        self._folder = fill(folder / "engines", ENGINE, RANKS)
        self._stack = stack
        stack.enter_context(importable("1.2", monkeypatch, log=self.log))

    def build(self, options: str = "", **settings: Any) -> TensorRTEngine:  # noqa: ANN401 - ShardConfig's
        config = ShardConfig(
            engine="tensorrt-llm",
            model_path=str(self._folder),
            tensor_parallel=2,
            trtllm_options=options,
            **settings,
        )
        engine = build(config)
        self._stack.callback(engine.close)
        engine.warm_up(WarmUpLimits())
        return engine


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> Compiled:
    return Compiled(tmp_path, monkeypatch, stack)


@pytest.mark.parametrize(
    ("options", "settings", "slots", "tokens"),
    [
        ("", {}, 64, 8192),
        ("", {"max_batch_size": 4}, 4, 8192),
        ("max_batch_size: 8\nmax_num_tokens: 1000", {"max_batch_size": 4}, 8, 1000),
        ("max_batch_size: 1000", {}, 64, 8192),
    ],
    ids=["as built", "our flag", "their option", "more than was built"],
)
def test_no_more_is_promised_than_a_compiled_engine_runs_at_once(
    compiled: Compiled, options: str, settings: dict[str, Any], slots: int, tokens: int
) -> None:
    info = compiled.build(options, **settings).info
    assert (info.max_slots, info.suggested_prefill_tokens) == (slots, tokens)
    sent = read_log(compiled.log).of("llm")[-1]["arguments"]
    assert min(sent.get("max_batch_size", 64), 64) == slots


@pytest.mark.parametrize(
    ("options", "settings", "problem"),
    [
        ("iter_stats_max_iteration: 5", {}, "the nearest is iter_stats_max_iterations"),
        ("event: 1", {}, "no option 'event'"),
        ("stream_interval: 3", {}, "no option 'stream_interval'"),
        ("max_seq_len: 128", {}, "max_seq_len was settled when the engines"),
        ("", {"dtype": "float16"}, "were built for bfloat16"),
    ],
    ids=["typing error", "no option", "the other backend's", "settled", "dtype"],
)
def test_what_a_compiled_engine_cannot_be_told_is_refused(
    compiled: Compiled, options: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(EngineError) as caught:
        compiled.build(options, **settings)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
