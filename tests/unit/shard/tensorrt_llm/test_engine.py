"""The engine over the stand-in, in both versions: what goes in comes out, and what breaks breaks as it should."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from self_driver import SelfDriver
from standin import VERSIONS, importable, model_folder

from text_generation_proto.values import FailureCode, FinishReason, Sampling, Stopping
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, InsufficientMemory, NewSequence, Orders, WarmUpLimits
from text_generation_shard.engines.tensorrt_llm.build import build
from text_generation_shard.engines.tensorrt_llm.engine import EngineBroken, TensorRTEngine

PROMPT = tuple(range(100, 120))
EOS = 2

Build = Callable[..., TensorRTEngine]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def built(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Builds engines, warmed up; `settings` are the stand-in's."""
    engines: list[TensorRTEngine] = []
    folder = model_folder(tmp_path / "model")

    def make(*, options: str = "", hang_timeout: float = 60.0, **settings: object) -> TensorRTEngine:
        stack.append(importable(version, monkeypatch, **settings))
        stack[-1].__enter__()
        config = ShardConfig(
            engine="tensorrt-llm", model_path=str(folder), trtllm_options=options, hang_timeout=hang_timeout
        )
        engine = build(config)
        engines.append(engine)
        engine.warm_up(WarmUpLimits())
        return engine

    stack: list = []  # type: ignore[type-arg]
    yield make
    for engine in engines:
        engine.close()
    for context in reversed(stack):
        context.__exit__(None, None, None)


def echoed(count: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return [prompt[at % len(prompt)] for at in range(count)]


def test_it_says_what_it_is(built: Build, version: str) -> None:
    info = built().info
    assert (info.engine, info.vocab_size, info.max_sequence_length, info.eos_token_ids) == (
        "tensorrt-llm",
        4096,
        2048,
        (EOS,),
    )
    refused = {name for name, _ in info.unsupported}
    assert {"typical_p", "watermark"} <= refused
    assert ("seed" in refused, "repetition_penalty" in refused, "prompt" in refused) == (version == "1.2",) * 3


def test_many_at_once_each_say_their_own(built: Build) -> None:
    driver = SelfDriver(built(step_ms=1))
    streams = [driver.admit(range(100 + n, 130 + 2 * n), 10 + n) for n in range(40)]
    driver.run()
    assert [stream.tokens for stream in streams] == [
        echoed(10 + n, tuple(range(100 + n, 130 + 2 * n))) for n in range(40)
    ]
    assert {stream.finish for stream in streams} == {FinishReason.LENGTH}
    assert all(-20 < logprob <= 0 for stream in streams for logprob in stream.logprobs)
    assert driver.engine.running == 0
    assert driver.step() is None


def test_several_tokens_a_step_are_told_together(built: Build) -> None:
    driver = SelfDriver(built(tokens_per_step=3))
    stream = driver.admit(PROMPT, 20)
    driver.run()
    assert stream.tokens == echoed(20)


@pytest.mark.parametrize(
    ("stopping", "tokens", "finish"),
    [
        (Stopping(9, frozenset([104])), 5, FinishReason.EOS_TOKEN),
        (Stopping(9, frozenset([EOS, 104, 110])), 5, FinishReason.EOS_TOKEN),
        (Stopping(9, frozenset([EOS]), frozenset([104])), 5, FinishReason.STOP_SEQUENCE),
        (Stopping(9, frozenset(), frozenset([104])), 5, FinishReason.STOP_SEQUENCE),
        (Stopping(5, frozenset([104])), 5, FinishReason.LENGTH),
        (Stopping(9), 9, FinishReason.LENGTH),
    ],
    ids=["eos", "several eos", "stop", "stop while eos is ignored", "length wins", "length"],
)
def test_it_stops_where_it_should(built: Build, stopping: Stopping, tokens: int, finish: FinishReason) -> None:
    driver = SelfDriver(built())
    stream = driver.admit(PROMPT, stopping=stopping)
    driver.run()
    assert (stream.tokens, stream.finish) == (echoed(tokens), finish)


def test_top_tokens_and_prompt_scores(built: Build, version: str) -> None:
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


def test_nothing_comes_for_a_released_slot_and_the_engine_forgets_it(built: Build) -> None:
    driver = SelfDriver(built(step_ms=2))
    gone, stays = driver.admit(PROMPT, 500), driver.admit(PROMPT, 50)
    while not gone.tokens:
        driver.step()
    driver.release(gone)
    driver.step()
    told = len(gone.tokens)
    successor = driver.admit(range(200, 210), 20)
    assert successor.slot == gone.slot
    driver.run()
    assert len(gone.tokens) == told
    assert (stays.tokens, successor.tokens) == (echoed(50), echoed(20, tuple(range(200, 210))))


def test_resetting_drops_everything(built: Build) -> None:
    engine = built(step_ms=2)
    driver = SelfDriver(engine)
    for _ in range(8):
        driver.admit(PROMPT, 1000)
    driver.step()
    engine.reset()
    assert engine.running == 0
    assert engine.step() is None


def test_waking_ends_a_step_that_waits(built: Build) -> None:
    engine = built(prefill_us=200_000)
    SelfDriver(engine).admit(PROMPT, 5)
    engine.apply(Orders(1, admit=(NewSequence(0, PROMPT, Stopping(5)),)))
    begun = time.monotonic()
    timer = threading.Timer(0.05, engine.wake)
    timer.start()
    result = engine.step()
    assert result is not None
    assert result.is_silent
    assert time.monotonic() - begun < 1.0  # the step's own wait
    timer.join()


# --------------------------------------------------------------------------------------------------------- what fails


def test_one_bad_sequence_fails_alone(built: Build) -> None:
    driver = SelfDriver(built(fail_token=777, step_ms=1))
    bad, good = driver.admit([1, 2, 777, 3], 10), driver.admit(PROMPT, 30)
    driver.run()
    assert bad.failure is not None
    assert bad.failure.code is FailureCode.STEP
    assert good.tokens == echoed(30)


def test_one_that_fails_when_nobody_else_runs_fails_alone_too(built: Build) -> None:
    driver = SelfDriver(built(fail_token=777))
    bad = driver.admit([1, 2, 777, 3], 10)
    driver.run()
    assert bad.failure is not None
    after = driver.admit(PROMPT, 5)
    driver.run()
    assert after.tokens == echoed(5)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"sampling": Sampling(greedy=False, typical_p=0.5)}, "typical_p"),
        ({"sampling": Sampling(watermark=True)}, "watermark"),
        ({"top_n": 21}, "top_n"),
        ({"sampling": Sampling(frequency_penalty=1.0, output_frequency_penalty=1.0)}, "frequency_penalty"),
    ],
    ids=["typical_p", "watermark", "top_n", "both frequency penalties"],
)
def test_what_cannot_be_had_is_refused_by_name(built: Build, asked: dict[str, object], name: str) -> None:
    driver = SelfDriver(built())
    stream = driver.admit(PROMPT, 5, **asked)
    driver.run()
    assert stream.failure is not None
    assert stream.failure.code is FailureCode.INVALID
    assert name in stream.failure.message


def test_blocks_chunks_and_slots_that_are_taken_are_refused(built: Build) -> None:
    engine = built(step_ms=5)
    admission = NewSequence(0, PROMPT, Stopping(100))
    assert engine.apply(Orders(1, admit=(admission,))) == []
    (taken,) = engine.apply(Orders(2, admit=(admission,)))
    (blocks,) = engine.apply(Orders(3, admit=(replace(admission, blocks=(0, 1)),)))
    assert engine.apply(Orders(4, admit=(admission,))) == []
    (chunk,) = engine.apply(Orders(5, prefill=((0, 5),)))
    assert [failure.code for failure in (taken, blocks, chunk)] == [FailureCode.INVALID] * 3
    assert engine.running == 0


def test_more_than_the_pool_holds_does_not_warm_up(built: Build) -> None:
    engine = built(options="kv_cache_config: {max_tokens: 1024}")
    assert engine.warm_up(WarmUpLimits()) * engine.info.block_size == 1024
    assert engine.warm_up(WarmUpLimits(max_batch_total_tokens=512)) * engine.info.block_size == 512
    with pytest.raises(InsufficientMemory, match="holds 1024 tokens"):
        engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096))


def until_broken(engine: TensorRTEngine) -> str:
    with pytest.raises(EngineBroken) as caught:
        for _ in range(200):
            engine.step()
    return str(caught.value)


@pytest.mark.parametrize("ends", [False, True], ids=["and the engine goes on", "and the engine's loop ends"])
def test_a_step_that_fails_for_all(built: Build, ends: bool) -> None:
    """With the overlap scheduler, 1.2's loop ends in silence behind a failed step."""
    engine = built(step_fail_token=777, step_fail_ends=int(ends), step_ms=1, hang_timeout=2.0)
    driver = SelfDriver(engine)
    streams = [driver.admit([5, 6, 777, 8], 10), *(driver.admit(PROMPT, 100) for _ in range(3))]
    if ends:
        with pytest.raises(EngineBroken):
            driver.run()
        return
    driver.run()
    assert all(stream.failure is not None for stream in streams)
    after = driver.admit(PROMPT, 5)
    driver.run()
    assert after.tokens == echoed(5)


def test_a_worker_process_that_dies_is_noticed_also_while_nothing_runs(built: Build) -> None:
    engine = built(workers=1)
    told = threading.Event()
    engine.on_broken(lambda _: told.set())
    (worker,) = engine._watchdog._processes
    os.kill(worker.pid, signal.SIGKILL)
    assert told.wait(20)
    assert "died" in until_broken(engine)


def test_an_engine_that_brings_nothing_any_more_is_broken(built: Build) -> None:
    engine = built(hang_step_token=777, step_ms=1, hang_timeout=1.0)
    heard: list[str] = []
    engine.on_broken(heard.append)
    engine.apply(Orders(1, admit=(NewSequence(0, (5, 6, 777, 8), Stopping(10)),)))
    assert "has brought nothing" in until_broken(engine)
    assert len(heard) == 1


def test_a_long_prompt_is_no_hang(built: Build) -> None:
    engine = built(prefill_us=1500, hang_timeout=1.0)
    driver = SelfDriver(engine)
    stream = driver.admit(range(10, 1610), 3)  # 2.4 s in one step
    driver.run()
    assert stream.tokens == [10, 11, 12]


def test_an_error_of_the_whole_is_one(built: Build) -> None:
    engine = built(fatal_token=777, step_ms=1, hang_timeout=2.0)  # nobody may say a word
    heard: list[str] = []
    engine.on_broken(heard.append)
    engine.apply(Orders(1, admit=(NewSequence(0, (5, 6, 777, 8), Stopping(10)), NewSequence(1, PROMPT, Stopping(50)))))
    until_broken(engine)
    assert heard


def test_what_cannot_be_built_is_one_line(built: Build, version: str) -> None:
    with pytest.raises(EngineError) as caught:
        built(options="no_such_option: 1")
    assert "no_such_option" in str(caught.value)
    assert "\n" not in str(caught.value)
