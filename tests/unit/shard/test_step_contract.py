"""The contract of engines that the router schedules: blocks and prefill chunks. See also `test_engine_contract`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from engine_driver import Driver
from tiny_engines import tiny_engine

from text_generation_proto.values import FailureCode, FinishReason, Stopping, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, NewSequence, Orders
from text_generation_shard.engines import build_engine

PROMPT = tuple(range(7, 47))


@pytest.fixture(scope="module", params=["echo", "torch"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=2048)))


def new_sequence(slot: int = 3, **changes: object) -> NewSequence:
    valid = NewSequence(slot, PROMPT, Stopping(4), blocks=(40, 41, 42))
    return replace(valid, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        new_sequence(computed_tokens=len(PROMPT)),
        new_sequence(computed_tokens=17, blocks=(40,)),
        new_sequence(blocks=(40, 41, 128)),
    ],
    ids=["nothing left to compute", "computed tokens without blocks", "unknown block"],
)
def test_a_sequence_with_bad_blocks_fails_alone(driver: Driver, bad: NewSequence) -> None:
    expected = driver.alone(PROMPT)
    neighbour = driver.admit(PROMPT)
    driver.step()
    (failure,) = driver.engine.apply(Orders(98, admit=(bad,)))
    assert (failure.slot, failure.code) == (bad.slot, FailureCode.INVALID)
    driver.run()
    assert neighbour.tokens == expected


@pytest.mark.parametrize("chunk", [1, 7, 16, 39])
def test_chunked_prefill_gives_the_same_tokens(driver: Driver, chunk: int) -> None:
    expected = driver.alone(PROMPT)
    stream = driver.admit(PROMPT, chunk=chunk)
    driver.run()
    assert stream.tokens == expected


def test_every_prompt_token_is_reported_prefilled_once(driver: Driver) -> None:
    stream = driver.admit(PROMPT, chunk=16)
    reports = [result.prefilled for result in (driver.step(), driver.step(), driver.step(), driver.step()) if result]
    assert reports == [[(stream.slot, 16)], [(stream.slot, 16)], [(stream.slot, 8)], []]


def test_a_sequence_pauses_until_it_has_blocks(driver: Driver) -> None:
    expected = driver.alone(PROMPT, new=40)
    stream = driver.admit(PROMPT, 40, granted=48)
    driver.run()
    # Positions 0 to 47 are computed; the last of them chose token 48, which has no room.
    assert len(stream.tokens) == 48 - len(PROMPT) + 1
    assert driver.step() is None
    driver.grant(stream, 16)
    driver.run()
    assert len(stream.tokens) == 64 - len(PROMPT) + 1
    driver.grant(stream, 16)
    driver.run()
    assert stream.tokens == expected


def test_a_release_during_prefill_drops_its_chunk(driver: Driver) -> None:
    gone = driver.admit(PROMPT, chunk=16)
    driver.step()
    driver.release(gone)
    assert driver.step() is None
    assert driver.engine.used_blocks == 0


@pytest.mark.parametrize(
    "orders",
    [
        Orders(98, prefill=((1, 1000),)),
        Orders(98, prefill=((1, 0),)),
        Orders(98, prefill=((1, 2), (1, 2))),
        Orders(98, grants=((1, (4096,)),)),
    ],
    ids=["chunk longer than the prompt", "empty chunk", "two chunks in a step", "unknown block"],
)
def test_an_invalid_chunk_or_block_fails_alone(driver: Driver, orders: Orders) -> None:
    expected = driver.alone(PROMPT)
    neighbour, broken = driver.admit(PROMPT), driver.admit(PROMPT, chunk=16)
    driver.step()
    assert broken.slot == 1
    failures = driver.engine.apply(orders)
    assert [failure.slot for failure in failures] == [1]
    driver.streams.pop(broken.slot)
    driver.run()
    assert neighbour.tokens == expected
    assert broken.tokens == []


def test_a_chunk_past_its_blocks_fails_alone(driver: Driver) -> None:
    neighbour, broken = driver.admit(PROMPT), driver.admit(PROMPT, granted=32)
    driver.run()
    assert neighbour.finish is FinishReason.LENGTH
    assert broken.failure is not None
    assert broken.failure.code is FailureCode.INVALID


def test_prompt_logprobs_are_reported_once_with_the_first_token(driver: Driver) -> None:
    whole = driver.admit(PROMPT, prompt_logprobs=True)
    chunked = driver.admit(PROMPT, prompt_logprobs=True, chunk=9)
    first = driver.step()
    assert first is not None
    assert [scores.slot for scores in first.prompt_logprobs] == [whole.slot]
    driver.run()
    for stream in (whole, chunked):
        (logprobs,) = stream.prompt_logprobs
        assert len(logprobs) == len(PROMPT)
        assert math.isnan(logprobs[0])
        assert all(logprob <= 0 for logprob in logprobs[1:])
    assert chunked.prompt_logprobs[0][1:] == pytest.approx(whole.prompt_logprobs[0][1:], abs=1e-5)


def test_prompt_logprobs_exclude_cached_and_generated_tokens(driver: Driver) -> None:
    first = driver.admit(PROMPT, 1, prompt_logprobs=True)
    driver.run()
    again = driver.admit(
        [*PROMPT, 5, 6], shared=first.blocks[:2], computed_tokens=32, generated_tokens=2, prompt_logprobs=True
    )
    driver.run()
    (logprobs,) = again.prompt_logprobs
    assert len(logprobs) == len(PROMPT)
    # Token 32 has no logprob either: the position before it was cached.
    assert all(math.isnan(logprob) for logprob in logprobs[:33])
    assert logprobs[33:] == pytest.approx(first.prompt_logprobs[0][33:], abs=1e-5)


def test_cached_tokens_are_not_computed_again(driver: Driver) -> None:
    expected = driver.alone(PROMPT)
    first = driver.admit(PROMPT, 30)
    driver.step()
    second = driver.admit(PROMPT, shared=first.blocks[:2], computed_tokens=32)
    result = driver.step()
    assert result is not None
    assert result.prefilled == [(second.slot, len(PROMPT) - 32)]
    driver.run()
    assert second.tokens == expected


def test_shared_blocks_count_once(driver: Driver) -> None:
    first = driver.admit(PROMPT, 20)
    driver.step()
    assert driver.engine.used_blocks == 4
    driver.admit(PROMPT, 20, shared=first.blocks[:2], computed_tokens=32)
    driver.step()
    assert driver.engine.used_blocks == 6
    driver.release(first)
    driver.step()
    assert driver.engine.used_blocks == 4


def test_the_echo_engine_keeps_its_configured_pace() -> None:
    engine = build_engine(ShardConfig(engine="echo", echo_step_ms=2, echo_prefill_us=500, echo_decode_us=3000))
    driver = Driver(engine, engine.warm_up(WarmUpLimits()))
    driver.admit(range(4), 9)
    driver.admit(range(6), 9)
    prefilling = driver.step()
    driver.admit(range(8), 9)
    mixed = driver.step()
    assert prefilling is not None
    assert mixed is not None
    assert prefilling.forward_ns >= 7e6  # 2 ms and ten prompt tokens
    assert mixed.forward_ns >= 12e6  # 2 ms, eight prompt tokens and two that decode
