"""The engine over the stand-in, in both releases: sequences, their ends, limits, KV blocks."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import psutil
import pytest
from byte_tokenizer import write_tokenizer
from model_folders import ENGINE, RANKS, fill
from self_driver import SelfDriver
from standin import importable, model_folder, read_log
from trtllm_engines import Engines, until

from text_generation_proto.values import (
    FailureCode,
    FinishReason,
    Grammar,
    GrammarKind,
    LogprobOptions,
    Sampling,
    Stopping,
    WarmUpLimits,
)
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, InsufficientMemory, NewSequence, Orders
from text_generation_shard.engines.tensorrt_llm.build import build
from text_generation_shard.engines.tensorrt_llm.engine import TensorRTEngine

PROMPT = tuple(range(100, 120))
CHURN, LONG_CHURN = 600, 10_000
"""Streams of the churn test, and of its long runs with speculative decoding."""
MAX_GROWTH = 24 << 20
"""Bytes that the process may grow by in the last four fifths of a long run."""
DRAFTERS = (
    "decoding_type: MTP, max_draft_len: 3",
    "decoding_type: Eagle3, max_draft_len: 3, speculative_model: draft",
    "decoding_type: NGram, max_draft_len: 3",
    "decoding_type: DraftTarget, max_draft_len: 3, speculative_model: draft",
)


def echoed(count: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return list(islice(cycle(prompt), count))


def test_top_tokens_and_prompt_logprobs(built: Engines, version: str) -> None:
    driver = SelfDriver(built())
    stream = driver.admit(PROMPT, 3, top_n=4)
    driver.run()
    assert [len(top.token_ids) for top in stream.top_tokens] == [4, 4, 4]
    assert all(list(top.logprobs) == sorted(top.logprobs, reverse=True) for top in stream.top_tokens)
    scored = driver.admit(PROMPT, 2, prompt_logprobs=True)
    driver.run()
    if version == "1.2":
        assert scored.failure is not None
        assert "prompt is not supported" in scored.failure.message
    else:
        (scores,) = scored.prompt_logprobs
        assert math.isnan(scores[0])
        assert all(logprob <= 0 for logprob in scores[1:])
        assert len(scores) == len(PROMPT)


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_scores_are_reported_as_far_as_they_are_asked_for(built: Engines, tokens_per_step: int) -> None:
    engine = built(tokens_per_step=tokens_per_step)
    asked = [LogprobOptions(), LogprobOptions(tokens=True), LogprobOptions(2)]
    placements = (NewSequence(slot, PROMPT, Stopping(7), logprobs=wanted) for slot, wanted in enumerate(asked))
    engine.apply(Orders(1, placements=tuple(placements)))
    scores: list[list[float]] = [[], [], []]
    tops = [0, 0, 0]
    while engine.running:
        result = engine.step()
        assert result is not None
        counts = result.token_counts or [1] * len(result.slots)
        each = iter(result.logprobs or [math.nan] * sum(counts))
        for slot, count in zip(result.slots, counts, strict=True):
            scores[slot] += islice(each, count)
        of_slot = dict(zip(result.slots, counts, strict=True))
        for top in result.top_tokens:
            assert (top.index < of_slot[top.slot], len(top.token_ids)) == (True, 2)
            tops[top.slot] += 1
    assert [sum(map(math.isnan, row)) for row in scores] == [7, 0, 0]
    assert ([len(row) for row in scores], tops) == ([7, 7, 7], [0, 0, 7])


def test_reset_drops_and_aborts_everything(built: Engines, tmp_path: Path) -> None:
    engine = built(step_ms=2, log=tmp_path / "log")
    driver = SelfDriver(engine)
    streams = [driver.admit(PROMPT, 1000) for _ in range(8)]
    while not all(stream.tokens for stream in streams):  # one that is dropped before it began is never submitted
        driver.step()
    engine.reset()
    assert engine.running == 0
    assert engine.step() is None
    until(lambda: read_log(tmp_path / "log").ends["cancelled"] == 8)
    assert len(read_log(tmp_path / "log").of("abort")) == 8
    built.close()
    assert read_log(tmp_path / "log").unfinished == set()


def test_wake_ends_a_waiting_step(built: Engines) -> None:
    engine = built(prefill_us=50_000)  # the prompt takes a second
    engine.apply(Orders(1, placements=(NewSequence(0, PROMPT, Stopping(5)),)))
    timer = threading.Timer(0.05, engine.wake)
    timer.start()
    result = engine.step()
    assert result is not None
    assert result.is_silent
    timer.join()


@pytest.mark.parametrize(
    ("drafter", "tokens_per_step"),
    [("", 1), ("", 3), *(pytest.param(drafter, 1, marks=pytest.mark.full) for drafter in DRAFTERS)],
)
def test_churn_leaves_nothing_behind(built: Engines, tmp_path: Path, drafter: str, tokens_per_step: int) -> None:
    """Streams that come, end and are released at random, also in the engine's queue: each ends once, and nothing holds any."""
    log = tmp_path / "log"
    draw = random.Random(7)
    # Fewer blocks than the slots need: requests wait in the engine.
    options = f"{f'speculative_config: {{{drafter}}}' if drafter else ''}\nkv_cache_config: {{max_tokens: 4096}}"
    engine = built(log=log, step_ms=0, tokens_per_step=tokens_per_step, max_batch_size=64, options=options)
    driver = SelfDriver(engine)
    streams, cancelled = [], set()
    count, queued, warm = LONG_CHURN if drafter else CHURN, 0, 0
    while len(streams) < count or driver.streams:
        for stream in list(driver.streams.values()):
            if draw.random() < 0.02:
                queued += not stream.tokens
                driver.release(stream)
                cancelled.add(stream)
        while len(streams) < count and len(driver.streams) < 64:
            start, length = draw.randrange(10, 4000), draw.randrange(1, 40)
            streams.append(driver.admit(range(start, start + length), draw.randrange(1, 120)))
            if len(streams) == LONG_CHURN // 5:
                warm = psutil.Process().memory_info().rss
        driver.step()
    assert engine.running == 0
    assert min(len(cancelled) - queued, queued) > count / 50
    for stream in streams:
        assert stream.tokens == echoed(len(stream.tokens), stream.prompt)
        if not drafter:
            assert len(stream.logprobs) == len(stream.tokens)
            assert all(-20 < logprob <= 0 for logprob in stream.logprobs)
        if stream not in cancelled:
            assert stream.finish is FinishReason.LENGTH
            assert len(stream.tokens) == stream.stopping.max_new_tokens
    assert not warm or psutil.Process().memory_info().rss - warm < MAX_GROWTH
    built.close()
    entries = read_log(log)
    assert entries.unfinished == set()
    assert (entries.ends["dropped"], entries.ends["error"]) == (0, 0)
    assert len(entries.of("request")) == sum(entries.ends.values())


# -------------------------------------------------------------------------------------------------------------- refusals


def test_a_schema_that_is_nested_too_deeply_is_refused(built: Engines, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "with-tokenizer")
    write_tokenizer(folder)
    driver = SelfDriver(built(folder=folder))
    for schema in ("[" * 100_000, '{"not":' * 100_000):
        stream = driver.admit(PROMPT, 5, grammar=Grammar(GrammarKind.JSON_SCHEMA, schema))
        driver.run()
        assert stream.failure is not None
        assert stream.failure.code is FailureCode.INVALID
        assert "recursion" in stream.failure.message


def test_blocks_chunks_and_taken_slots_are_refused(built: Engines) -> None:
    engine = built(step_ms=5)
    sequence = NewSequence(0, PROMPT, Stopping(100))
    assert engine.apply(Orders(1, placements=(sequence,))) == []
    (taken,) = engine.apply(Orders(2, placements=(sequence,)))
    (blocks,) = engine.apply(Orders(3, placements=(replace(sequence, blocks=(0, 1)),)))
    assert engine.apply(Orders(4, placements=(sequence,))) == []
    (chunk,) = engine.apply(Orders(5, prefill=((0, 5),)))
    assert [failure.code for failure in (taken, blocks, chunk)] == [FailureCode.INVALID] * 3
    assert "slot 0 is taken" in taken.message
    assert engine.running == 0


def test_an_engine_that_cannot_be_built_is_refused_in_one_line(built: Engines) -> None:
    """The stand-in has no other capacity policy; its worker fails as a worker of the library does."""
    with pytest.raises(EngineError) as caught:
        built(options="scheduler_config: {capacity_scheduler_policy: STATIC_BATCH}")
    assert "could not build the engine: Executor worker returned error (NotImplementedError: " in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- KV blocks


def test_warm_up_beyond_the_pool_fails(built: Engines) -> None:
    engine = built(options="kv_cache_config: {max_tokens: 1024}")
    assert engine.warm_up(WarmUpLimits())[0].num_blocks * engine.info.block_size == 1024
    assert engine.warm_up(WarmUpLimits(max_batch_total_tokens=512))[0].num_blocks * engine.info.block_size == 512
    assert engine.warm_up(WarmUpLimits(max_batch_total_tokens=16))[0].num_blocks == 0
    with pytest.raises(InsufficientMemory, match="holds 1024 tokens"):
        engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096))


def test_a_sequence_may_fill_the_pool(built: Engines) -> None:
    driver = SelfDriver(built(options="kv_cache_config: {max_tokens: 1024}"))
    fits = driver.admit(PROMPT, 1024 - len(PROMPT))
    driver.run()
    assert (len(fits.tokens), fits.finish) == (1024 - len(PROMPT), FinishReason.LENGTH)


def test_statistics_while_busy_and_idle(built: Engines) -> None:
    """20 + 1000 tokens take 32 blocks of 32."""
    engine = built(step_ms=2)
    driver = SelfDriver(engine)
    running = driver.admit(PROMPT, 1000)
    while engine.used_blocks == 0:
        assert driver.step() is not None
    assert (engine.used_blocks, engine.running, engine.queued) == (32, 1, 0)
    driver.release(running)
    driver.step()
    until(lambda: not engine.used_blocks)  # the statistics are reset by another thread


# ------------------------------------------------------------------------------------------------------ compiled engines


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorRTEngine]:
    folder = fill(tmp_path / "engines", ENGINE, RANKS | {"generation_config.json": b'{"eos_token_id": [7, 8]}'})
    with importable("1.2", monkeypatch):
        engine = build(ShardConfig(engine="tensorrt-llm", model_path=str(folder), tensor_parallel=2))
        yield engine
        engine.close()


def test_a_compiled_engine(compiled: TensorRTEngine) -> None:
    info = compiled.info
    assert (info.dtype, info.vocab_size, info.block_size) == ("bfloat16", 128256, 64)
    assert (info.max_slots, info.suggested_prefill_tokens, info.max_sequence_length) == (64, 8192, 4096)
    assert info.eos_token_ids == (7, 8)
    # The stand-in's cache has 2048 blocks of 32 tokens; the engine counts in blocks of its info.
    assert compiled.warm_up(WarmUpLimits())[0].num_blocks == 1024
    driver = SelfDriver(compiled)
    stream = driver.admit(PROMPT, 30, sampling=Sampling(repetition_penalty=1.2), top_n=2)
    driver.run()
    assert (len(stream.tokens), stream.finish) == (30, FinishReason.LENGTH)
    assert [len(top.token_ids) for top in stream.top_tokens] == [2] * 30
