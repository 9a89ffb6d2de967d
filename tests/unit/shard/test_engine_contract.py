"""The contract of all engines: `engine.Engine` and shard.proto.

The part for engines that the router schedules (blocks, chunks) is in `test_step_contract`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from engine_driver import Driver
from self_driver import driver_for
from standin import importable, model_folder
from tiny_engines import tiny_engine

from text_generation_proto.values import FailureCode, FinishReason, Sampling, Stopping, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, NewSequence, Orders
from text_generation_shard.engines import build_engine

PROMPT = tuple(range(7, 47))
SEEDED = Sampling(greedy=False, temperature=1.5, top_k=50, seed=11)


STEPPING = ("echo", "self-scheduling echo", "torch")
"""Engines that compute a step when `step` is called."""


@pytest.fixture(scope="module", params=[*STEPPING, "tensorrt-llm"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    if request.param != "tensorrt-llm":
        yield tiny_engine(request.param, folder)
        return
    model_folder(folder, max_position_embeddings=256)
    with pytest.MonkeyPatch.context() as patch, importable("1.3", patch):
        engine = build_engine(ShardConfig(engine="tensorrt-llm", model_path=str(folder), max_batch_size=12))
        yield engine
        engine.close()


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return driver_for(engine, WarmUpLimits(max_batch_total_tokens=2048))


def test_warm_up_allocates_max_batch_total_tokens(engine: Engine) -> None:
    assert engine.warm_up(WarmUpLimits(max_batch_total_tokens=512))[0].num_blocks == 512 // engine.info.block_size


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "seeded"])
def test_tokens_do_not_depend_on_the_batch(driver: Driver, sampling: Sampling) -> None:
    expected = driver.alone(PROMPT, sampling=sampling)
    for length in (1, 9, 70, 33):
        driver.admit(range(3, 3 + length), 30)
    driver.step()
    stream = driver.admit(PROMPT, sampling=sampling)
    driver.admit(range(50, 80), 5, chunk=7)
    driver.run()
    assert stream.tokens == expected


@pytest.mark.parametrize("engine", STEPPING, indirect=True)
def test_a_released_slot_gets_no_tokens(driver: Driver) -> None:
    gone, stays = driver.admit(PROMPT, 20), driver.admit(PROMPT, 20)
    driver.step()
    driver.release(gone)
    assert driver.engine.apply(Orders(99, release=(10_000,))) == []  # an unknown slot is ignored
    result = driver.step()
    assert result is not None
    assert result.slots == [stays.slot]
    assert len(gone.tokens) == 1
    assert driver.engine.running == 1


def test_a_slot_can_be_released_and_reused_in_the_same_orders(driver: Driver) -> None:
    expected = driver.alone(PROMPT)
    gone = driver.admit(range(60, 90), 20)
    driver.step()
    driver.release(gone)
    stream = driver.admit(PROMPT)
    assert stream.slot == gone.slot
    driver.run()
    assert stream.tokens == expected


@pytest.mark.parametrize("engine", STEPPING, indirect=True)
def test_finishing_frees_the_slot_and_its_blocks(driver: Driver) -> None:
    driver.admit(PROMPT, 2)
    driver.step()
    assert (driver.engine.running, driver.engine.used_blocks) == (1, 3)
    driver.step()
    assert (driver.engine.running, driver.engine.used_blocks) == (0, 0)
    assert driver.step() is None


@pytest.mark.parametrize(
    ("stopping", "tokens", "reason"),
    [
        (lambda t: Stopping(3, eos_token_ids=frozenset([t])), 3, FinishReason.LENGTH),
        (lambda t: Stopping(8, eos_token_ids=frozenset([t])), 3, FinishReason.EOS_TOKEN),
        (lambda t: Stopping(8, stop_token_ids=frozenset([t])), 3, FinishReason.STOP_SEQUENCE),
        (lambda t: Stopping(8, frozenset([t]), frozenset([t])), 3, FinishReason.EOS_TOKEN),
    ],
    ids=["length wins over eos", "eos", "stop token", "eos wins over stop token"],
)
def test_a_sequence_ends_at(
    driver: Driver, stopping: Callable[[int], Stopping], tokens: int, reason: FinishReason
) -> None:
    # Sampled, so that the third token differs from the first two in every model.
    draws = driver.alone(PROMPT, sampling=SEEDED)
    assert draws[2] not in draws[:2]
    stream = driver.admit(PROMPT, sampling=SEEDED, stopping=stopping(draws[2]))
    driver.run()
    assert (stream.tokens, stream.finish) == (draws[:tokens], reason)


def test_the_first_min_new_tokens_do_not_end_a_sequence(driver: Driver) -> None:
    torch = driver.engine.info.engine == "torch"
    ends = frozenset(range(driver.engine.info.vocab_size)) - {3} if torch else frozenset(PROMPT)
    stream = driver.admit(PROMPT, stopping=Stopping(40, stop_token_ids=ends, min_new_tokens=5))
    driver.run()
    assert (len(stream.tokens), stream.finish) == (6, FinishReason.STOP_SEQUENCE)


@pytest.mark.parametrize(
    "bad",
    [
        NewSequence(12, PROMPT, Stopping(4)),
        NewSequence(3, (), Stopping(4)),
        NewSequence(3, PROMPT, Stopping(4), Sampling(temperature=math.nan)),
        NewSequence(3, PROMPT, Stopping(4), blocks=(40, 41, 128)),
    ],
    ids=["slot past the last", "empty prompt", "temperature NaN", "unknown block"],
)
def test_an_invalid_sequence_fails_alone(driver: Driver, bad: NewSequence) -> None:
    expected = driver.alone(PROMPT)
    neighbour = driver.admit(PROMPT)
    driver.step()
    (failure,) = driver.engine.apply(Orders(98, placements=(bad,)))
    assert (failure.slot, failure.code) == (bad.slot, FailureCode.INVALID)
    assert "\n" not in failure.message
    driver.run()
    assert neighbour.tokens == expected
    assert driver.engine.running == 0


@pytest.mark.parametrize("engine", STEPPING, indirect=True)
def test_top_tokens_are_reported_best_first_on_request(driver: Driver) -> None:
    with_top, without_top = driver.admit(PROMPT, 3, top_n=5), driver.admit(PROMPT, 3)
    driver.run()
    assert len(with_top.top_tokens) == 3
    assert without_top.top_tokens == []
    for token, logprob, top in zip(with_top.tokens, with_top.logprobs, with_top.top_tokens, strict=True):
        assert top.index == 0
        assert len(top.token_ids) == len(top.logprobs) >= 5
        assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
        assert (top.token_ids[0], top.logprobs[0]) == (token, pytest.approx(logprob, abs=1e-5))


PENALIZED = replace(SEEDED, repetition_penalty=1.3, frequency_penalty=0.5)
OUTPUT_PENALIZED = replace(SEEDED, output_frequency_penalty=1.5, output_presence_penalty=1.0, min_p=0.01)


@pytest.mark.parametrize("engine", STEPPING, indirect=True)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), SEEDED, PENALIZED, OUTPUT_PENALIZED],
    ids=["greedy", "seeded", "penalized", "output penalized"],
)
@pytest.mark.parametrize("steps", [1, 5, 19])
def test_a_preempted_sequence_continues(driver: Driver, sampling: Sampling, steps: int) -> None:
    expected = driver.alone(PROMPT, new=20, sampling=sampling)
    before = driver.admit(PROMPT, 20, sampling=sampling)
    for _ in range(steps):
        driver.step()
    after = driver.preempt(before)
    driver.admit(range(90, 110), 30)
    driver.run()
    assert before.tokens + after.tokens == expected
    assert after.finish is FinishReason.LENGTH


def test_penalties_ignore_the_previous_sequence_of_a_slot(driver: Driver) -> None:
    expected = driver.alone(PROMPT, sampling=PENALIZED)
    driver.alone(tuple(range(100, 160)), new=30, sampling=PENALIZED)
    assert driver.alone(PROMPT, sampling=PENALIZED) == expected


@pytest.mark.parametrize("engine", STEPPING, indirect=True)
def test_reset_drops_everything(driver: Driver) -> None:
    driver.admit(PROMPT)
    driver.admit(PROMPT, chunk=8)
    driver.step()
    driver.engine.reset()
    assert (driver.engine.running, driver.engine.used_blocks) == (0, 0)
    assert driver.engine.step() is None
