"""The engine that launches a step before it has read the one before it says what the engine says that does not.

The executor of GPUs runs here on a CPU, with plain kernels: what is looked at is the order of things, not the kernels.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_driver import Driver, Stream
from full_grid import full
from poisoned_checkpoint import POISON, write_poisoned_checkpoint

from text_generation_proto.values import FailureCode, FinishReason, Sampling, Stopping
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Orders, WarmUpLimits
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.build import engine_info
from text_generation_shard.engines.torch.cuda.build import build_on_cuda
from text_generation_shard.engines.torch.model_config import read_model_config

SAMPLED = Sampling(greedy=False, temperature=0.8, top_p=0.9, repetition_penalty=1.2, output_presence_penalty=0.5)


@dataclass(frozen=True)
class Engines:
    at_once: Engine
    ahead: Engine


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = write_poisoned_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    trace = tmp_path_factory.mktemp("trace") / "steps.jsonl"
    config = ShardConfig(model_path=str(folder), device="cpu", max_batch_size=8, trace_steps=str(trace))
    shape = read_model_config(Path(folder))
    info = engine_info(config, shape, torch.device("cpu"), None)
    at_once = build_engine(config.model_copy(update={"trace_steps": ""}))
    engines = Engines(at_once, build_on_cuda(config, shape, info, None))
    yield engines
    engines.ahead.close()


@pytest.fixture
def ahead(engines: Engines) -> Driver:
    return warm(engines.ahead)


def warm(engine: Engine) -> Driver:
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))


def traffic(driver: Driver, seed: int) -> list[Stream]:
    """Sequences that come, end and are released in the middle of others' steps."""
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
def test_it_says_the_same(engines: Engines, seed: int) -> None:
    expected, got = traffic(warm(engines.at_once), seed), traffic(warm(engines.ahead), seed)
    assert any(stream.finish is FinishReason.EOS_TOKEN for stream in expected) or seed != 1
    for one, other in zip(expected, got, strict=True):
        assert (other.tokens, other.finish, other.failure) == (one.tokens, one.finish, one.failure)
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert [top.token_ids for top in other.top_tokens] == [top.token_ids for top in one.top_tokens]
        for scores, exact in zip(other.prompt_scores, one.prompt_scores, strict=True):
            assert scores.logprobs[1:] == pytest.approx(exact.logprobs[1:], abs=1e-4)
            assert scores.tops is not None
            assert exact.tops is not None
            assert [ids for ids, _ in scores.tops] == [ids for ids, _ in exact.tops]


def test_a_step_is_reported_when_the_next_one_is_launched(ahead: Driver) -> None:
    stream = ahead.admit(range(3, 20), 3)
    told = []
    while (result := ahead.step()) is not None:
        told.append((len(result.prefilled), len(result.slots), result.is_silent))
    assert told == [(0, 0, True), (1, 1, False), (0, 1, False), (0, 1, False)]
    assert stream.finish is FinishReason.LENGTH


def test_what_a_step_under_way_brings_for_a_released_sequence_is_dropped(ahead: Driver) -> None:
    first = ahead.admit(range(3, 20), 50)
    for _ in range(4):
        ahead.step()
    known = list(first.tokens)
    ahead.release(first)
    second = ahead.admit(range(30, 60), 6)
    assert second.slot == first.slot
    ahead.run()
    assert first.tokens == known
    alone = warm(ahead.engine)
    expected = alone.admit(range(30, 60), 6)
    alone.run()
    assert second.tokens == expected.tokens


def test_a_grant_bounds_what_is_launched_ahead(ahead: Driver) -> None:
    stream = ahead.admit(range(3, 19), 40, granted=32)
    ahead.run()
    # Positions 0 to 31 are computed; the last of them chooses the token at position 32.
    assert len(stream.tokens) == 32 - 16 + 1
    ahead.grant(stream, 16)
    ahead.run()
    assert len(stream.tokens) == 48 - 16 + 1


def test_nan_logits_fail_their_sequence_alone(ahead: Driver) -> None:
    bad, neighbour = ahead.admit((3, 4, POISON), 9), ahead.admit((3, 4, 5), 9)
    ahead.run()
    assert bad.failure is not None
    assert (bad.failure.code, bad.tokens) == (FailureCode.NUMERICS, [])
    assert neighbour.finish is FinishReason.LENGTH


def test_a_step_that_raises_fails_its_sequences_and_the_one_before_it_is_still_told(ahead: Driver) -> None:
    running = ahead.admit(range(3, 40), 30)
    for _ in range(3):
        ahead.step()
    assert len(running.tokens) == 2
    broken = ahead.admit((-(1 << 40), 3))  # no id the wire can carry does any harm; this one is none for a device
    ahead.step()
    for stream in (broken, running):
        assert stream.failure is not None
        assert stream.failure.code is FailureCode.STEP
    assert ahead.engine.running == 0
    after = ahead.admit(range(3, 40), 4)
    ahead.run()
    assert after.finish is FinishReason.LENGTH


def test_it_is_quiet_once_everything_is_told(engines: Engines) -> None:
    driver = warm(engines.ahead)
    driver.admit(range(3, 20), 5, stopping=Stopping(5, frozenset(range(200))))
    driver.run()
    assert engines.ahead.apply(Orders(number=99)) == []
    assert engines.ahead.step() is None


def test_the_trace_has_a_line_for_each_step(engines: Engines, ahead: Driver) -> None:
    ahead.admit(range(3, 20), 4)
    ahead.run()
    path = Path(engines.ahead._trace._file.name)  # type: ignore[attr-defined]
    last = [json.loads(line) for line in path.read_text().splitlines()][-4:]
    assert [line["kind"] for line in last] == ["prefill", "decode", "decode", "decode"]
    assert [line["tokens"] for line in last] == [17, 1, 1, 1]
    assert "gap_us" not in last[0]
    for line in last[1:]:
        assert line["wall_us"] >= 0
        assert line["host_us"] >= 0
        assert line["device_us"] > 0
