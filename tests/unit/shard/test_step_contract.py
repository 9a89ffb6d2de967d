"""The contract of engines that the router schedules: blocks and prefill chunks. See also `test_engine_contract`."""

from __future__ import annotations

import math

import pytest
from engine_driver import Driver
from tiny_engines import tiny_engine

from text_generation_proto.values import FailureCode, FinishReason, Sampling, Stopping, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Orders
from text_generation_shard.engines import build_engine

PROMPT = tuple(range(7, 47))
ENDS = frozenset(range(10, 290))


@pytest.fixture(scope="module", params=["echo", "torch"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=2048)))


@pytest.mark.parametrize("chunk", [1, 7, 16, 39])
def test_a_chunked_prompt_gives_the_same_tokens_and_is_reported_once(driver: Driver, chunk: int) -> None:
    expected = driver.alone(PROMPT)
    stream = driver.admit(PROMPT, chunk=chunk)
    results = list(iter(driver.step, None))
    assert stream.tokens == expected
    whole, rest = divmod(len(PROMPT), chunk)
    chunks = [chunk] * whole + [rest] * (rest > 0)
    assert [part for result in results for part in result.prefilled] == [(stream.slot, size) for size in chunks]


def test_a_sequence_pauses_until_it_has_blocks(driver: Driver) -> None:
    expected = driver.alone(PROMPT, new=40)
    stream = driver.admit(PROMPT, 40, allocated=48)
    for positions in (48, 64):
        driver.run()
        # These positions are computed; the last of them chose a token that has no room.
        assert len(stream.tokens) == positions - len(PROMPT) + 1
        assert driver.step() is None
        driver.allocate(stream, 16)
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
        Orders(98, prefill=((1, 24),)),
        Orders(98, allocations=((1, (4096,)),)),
    ],
    ids=[
        "chunk longer than the prompt",
        "empty chunk",
        "chunk past its blocks",
        "unknown block",
    ],
)
def test_an_invalid_chunk_or_block_fails_alone(driver: Driver, orders: Orders) -> None:
    expected = driver.alone(PROMPT)
    neighbour, broken = driver.admit(PROMPT), driver.admit(PROMPT, chunk=16, allocated=32)
    driver.step()
    failures = [(failure.slot, failure.code) for failure in driver.engine.apply(orders)]
    assert failures == [(broken.slot, FailureCode.INVALID)]
    driver.streams.pop(broken.slot)
    driver.run()
    assert (neighbour.tokens, broken.tokens) == (expected, [])


def test_prompt_logprobs_are_reported_once_with_the_first_token_in_chunks_too(driver: Driver) -> None:
    whole = driver.admit(PROMPT, 1, prompt_logprobs=True, prompt_top_n=4)
    chunked = driver.admit(PROMPT, prompt_logprobs=True, prompt_top_n=4, chunk=7)
    without_tops = driver.admit(PROMPT, 1, prompt_logprobs=True)
    first = driver.step()
    assert first is not None
    assert [scores.slot for scores in first.prompt_logprobs] == [whole.slot, without_tops.slot]
    driver.run()
    (scores,), (again,), (plain,) = whole.prompt_scores, chunked.prompt_scores, without_tops.prompt_scores
    for logprobs in (scores.logprobs, again.logprobs, plain.logprobs):
        assert math.isnan(logprobs[0])
        assert all(logprob <= 0 for logprob in logprobs[1:])
        assert logprobs[1:] == pytest.approx(scores.logprobs[1:], abs=1e-5)
    assert plain.tops is None
    assert scores.tops is not None
    assert again.tops is not None
    assert scores.tops[0] == ((), ())
    for token, logprob, (ids, tops), (_, tops_again) in list(
        zip(PROMPT, scores.logprobs, scores.tops, again.tops, strict=True)
    )[1:]:
        assert len(ids) == len(set(ids)) == 4
        assert list(tops) == sorted(tops, reverse=True)
        assert tops_again == pytest.approx(tops, abs=1e-4)
        if token in ids:
            assert tops[ids.index(token)] == pytest.approx(logprob, abs=1e-5)
        else:
            assert logprob <= tops[-1] + 1e-5


def test_prompt_logprobs_exclude_cached_and_generated_tokens(driver: Driver) -> None:
    settings = {"prompt_logprobs": True, "prompt_top_n": 2}
    first = driver.admit(PROMPT, 1, **settings)
    driver.run()
    reused = {"shared": first.blocks[:2], "computed_tokens": 32, "generated_tokens": 2, "chunk": 7}
    again = driver.admit([*PROMPT, 5, 6], **reused, **settings)
    driver.run()
    (logprobs,), (scores,), (whole,) = again.prompt_logprobs, again.prompt_scores, first.prompt_scores
    assert scores.tops is not None
    assert whole.tops is not None
    assert scores.tops[:33] == [((), ())] * 33
    assert [ids for ids, _ in scores.tops[33:]] == [ids for ids, _ in whole.tops[33:]]
    assert len(logprobs) == len(PROMPT)
    # Token 32 has no logprob either: the position before it was cached.
    assert all(math.isnan(logprob) for logprob in logprobs[:33])
    assert logprobs[33:] == pytest.approx(first.prompt_logprobs[0][33:], abs=1e-5)


def test_cached_tokens_are_not_computed_again_and_shared_blocks_count_once(driver: Driver) -> None:
    expected = driver.alone(PROMPT)
    first = driver.admit(PROMPT, 20)
    driver.step()
    assert driver.engine.used_blocks == 4
    second = driver.admit(PROMPT, shared=first.blocks[:2], computed_tokens=32)
    result = driver.step()
    assert result is not None
    assert result.prefilled == [(second.slot, len(PROMPT) - 32)]
    assert driver.engine.used_blocks == 5
    driver.release(first)
    driver.step()
    assert driver.engine.used_blocks == 3
    driver.run()
    assert second.tokens == expected


@pytest.mark.parametrize("kind", ["eos", "stop"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(greedy=False, temperature=2.0, seed=3)], ids=str)
def test_no_sequence_ends_before_min_new_tokens(driver: Driver, sampling: Sampling, kind: str) -> None:
    ends = (ENDS, frozenset[int]()) if kind == "eos" else (frozenset[int](), ENDS)
    early = driver.admit(PROMPT, sampling=sampling, stopping=Stopping(40, *ends))
    late = driver.admit(PROMPT, sampling=sampling, stopping=Stopping(40, *ends, min_new_tokens=12))
    driver.run()
    assert len(early.tokens) < 12 < len(late.tokens)
    assert late.finish is (FinishReason.EOS_TOKEN if kind == "eos" else FinishReason.STOP_SEQUENCE)
    if driver.engine.info.engine == "torch":
        assert not set(late.tokens[:12]) & ENDS


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
