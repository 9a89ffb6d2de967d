"""The engine with asynchronous steps gives the same results as the engine with synchronous ones.

The GPU executor runs here on a CPU with the reference kernels: the order of operations is tested, not the kernels.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from engine_driver import Driver, Stream
from full_grid import full
from poisoned_checkpoint import POISON, write_poisoned_checkpoint
from reference_kernels import reference_engine

from text_generation_proto.values import FailureCode, FinishReason, Sampling, Stopping, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Orders
from text_generation_shard.engines import build_engine

SAMPLED = Sampling(greedy=False, temperature=0.8, top_p=0.9, repetition_penalty=1.2, output_presence_penalty=0.5)


@dataclass(frozen=True)
class Engines:
    synchronous: Engine
    asynchronous: Engine
    trace: Path


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = write_poisoned_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    trace = tmp_path_factory.mktemp("trace") / "steps.jsonl"
    config = ShardConfig(model_path=str(folder), device="cpu", max_batch_size=8, trace_steps=str(trace))
    synchronous = build_engine(config.model_copy(update={"trace_steps": ""}))
    engines = Engines(synchronous, reference_engine(config), trace)
    yield engines
    engines.asynchronous.close()


@pytest.fixture
def ahead(engines: Engines) -> Driver:
    return warm(engines.asynchronous)


def warm(engine: Engine) -> Driver:
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=512)))


def traffic(driver: Driver, seed: int) -> list[Stream]:
    """Run sequences that start, end and are released while others run."""
    draw = random.Random(seed)
    streams: list[Stream] = []
    for number in range(8):
        prompt = [draw.randrange(3, POISON) for _ in range(draw.randrange(1, 60))]
        new = draw.randrange(2, 30)
        stopping = Stopping(
            new, frozenset(draw.sample(range(200), 12)), frozenset({5}), min(draw.choice((0, 1, 9)), new - 1)
        )
        streams.append(
            driver.admit(
                prompt,
                stopping=stopping,
                chunk=draw.choice([7, 16, 100]),
                sampling=SAMPLED if number % 3 == 0 else Sampling(),
                top_n=number % 2,
                prompt_logprobs=number % 4 == 1,
                prompt_top_n=2 if number % 4 == 1 else 0,
            )
        )
        for _ in range(draw.randrange(4)):
            driver.step()
    driver.run()
    return streams


@pytest.mark.parametrize("seed", [1, 4, *(full(seed) for seed in (0, 2, 3, 5))])
def test_results_do_not_depend_on_asynchrony(engines: Engines, seed: int) -> None:
    expected, got = traffic(warm(engines.synchronous), seed), traffic(warm(engines.asynchronous), seed)
    assert any(stream.finish is FinishReason.EOS_TOKEN for stream in expected) or seed != 1
    for exact, other in zip(expected, got, strict=True):
        # A slot is free one step later.
        failure = other.failure and replace(other.failure, slot=exact.slot)
        assert (other.tokens, other.finish, failure) == (exact.tokens, exact.finish, exact.failure)
        assert other.logprobs == pytest.approx(exact.logprobs, abs=1e-4)
        assert [top.token_ids for top in other.top_tokens] == [top.token_ids for top in exact.top_tokens]
        for scores, expected_scores in zip(other.prompt_scores, exact.prompt_scores, strict=True):
            assert scores.logprobs[1:] == pytest.approx(expected_scores.logprobs[1:], abs=1e-4)
            assert scores.tops is not None
            assert expected_scores.tops is not None
            assert [ids for ids, _ in scores.tops] == [ids for ids, _ in expected_scores.tops]


def test_a_step_is_traced_and_reported_when_the_next_one_is_launched(engines: Engines, ahead: Driver) -> None:
    stream = ahead.admit(range(3, 20), 3)
    reported = []
    while (result := ahead.step()) is not None:
        reported.append((len(result.prefilled), len(result.slots), result.is_silent))
    assert reported == [(0, 0, True), (1, 1, False), (0, 1, False), (0, 1, False)]
    assert stream.finish is FinishReason.LENGTH
    last = [json.loads(line) for line in engines.trace.read_text().splitlines()][-3:]
    assert [line["kind"] for line in last] == ["prefill", "decode", "decode"]
    assert [line["tokens"] for line in last] == [17, 1, 1]
    assert "gap_us" not in last[0]
    assert all(line["wall_us"] >= 0 and line["host_us"] >= 0 and line["device_us"] > 0 for line in last[1:])
    # Nothing follows the last result.
    ahead.admit(range(3, 20), 5, stopping=Stopping(5, frozenset(range(200))))
    ahead.run()
    assert ahead.engine.apply(Orders(number=99)) == []
    assert ahead.engine.step() is None


def test_results_in_flight_of_a_released_sequence_are_dropped(ahead: Driver) -> None:
    first = ahead.admit(range(3, 20), 50)
    for _ in range(4):
        ahead.step()
    known = list(first.tokens)
    ahead.release(first)
    second = ahead.admit(range(30, 60), 6)
    assert second.slot == first.slot
    ahead.run()
    assert first.tokens == known
    assert second.tokens == ahead.alone(range(30, 60), 6)


def test_allocated_blocks_bound_what_is_launched(ahead: Driver) -> None:
    stream = ahead.admit(range(3, 19), 40, allocated=32)
    ahead.run()
    # Positions 0 to 31 are computed; the last one samples the token at position 32.
    assert len(stream.tokens) == 32 - 16 + 1
    ahead.allocate(stream, 16)
    ahead.run()
    assert len(stream.tokens) == 48 - 16 + 1


def test_nan_logits_fail_only_their_sequence(ahead: Driver) -> None:
    bad, neighbour = ahead.admit((3, 4, POISON), 9), ahead.admit((3, 4, 5), 9)
    ahead.run()
    assert bad.failure is not None
    assert (bad.failure.code, bad.tokens) == (FailureCode.NUMERICS, [])
    assert neighbour.finish is FinishReason.LENGTH


def test_a_step_that_raises_fails_its_sequences_after_the_previous_step_is_reported(ahead: Driver) -> None:
    running = ahead.admit(range(3, 40), 30)
    for _ in range(3):
        ahead.step()
    assert len(running.tokens) == 2
    # No seed that the wire can carry makes a step raise; this one does.
    broken = ahead.admit((2, 3), sampling=Sampling(greedy=False, seed=1 << 80))
    ahead.step()
    for stream in (broken, running):
        assert stream.failure is not None
        assert stream.failure.code is FailureCode.STEP
    assert ahead.engine.running == 0
    after = ahead.admit(range(3, 40), 4)
    ahead.run()
    assert after.finish is FinishReason.LENGTH
