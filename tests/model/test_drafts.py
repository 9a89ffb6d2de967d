"""Drafts of the demo model: repeated edits take fewer steps, and no text changes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from edited_texts import second_edits
from engine_driver import Driver, Stream
from scripted_drafts import draft_by
from tokenizers import Tokenizer

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.step.drafts.drafter import Drafter
from text_generation_shard.step.sequence import StepRows


class Timed(Drafter):
    """A drafter for which steps take the times of an idle machine."""

    def took(self, rows: StepRows, seconds: float, *, began_ahead: bool) -> None:
        super().took(rows, 0.02 + 0.003 * rows.tokens, began_ahead=began_ahead)


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[Engine]:
    engine = build_engine(ShardConfig(model_path=str(demo_model), device="cpu", dtype="float32", max_batch_size=16))
    yield engine
    engine.close()


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=8192, max_batch_prefill_tokens=256)))


@pytest.fixture(scope="module")
def edits(demo_model: Path) -> list[tuple[list[int], list[int]]]:
    """The tokens of each prompt for a second edit, and of the answer that it asks for."""
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    return [(tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids) for prompt, answer in second_edits()]


def run(driver: Driver, prompt: list[int], new: int, prediction: Sequence[int] = ()) -> tuple[Stream, int, float]:
    """Generate `new` tokens; return the sequence, the number of steps and the seconds after the first token."""
    stream = driver.admit(prompt, new, prediction=tuple(prediction))
    while not stream.tokens:
        driver.step()
    steps, started = 0, time.perf_counter()
    while driver.step() is not None:
        steps += 1
    return stream, steps, time.perf_counter() - started


@pytest.mark.full  # tests/unit/shard/test_draft_lookup.py follows texts with edits
@pytest.mark.parametrize("number", range(3))
def test_a_second_edit_takes_half_the_steps_and_has_the_same_text(
    driver: Driver, edits: list[tuple[list[int], list[int]]], number: int
) -> None:
    prompt, answer = edits[number]
    assert 300 < len(answer) < 500
    new = 60
    draft_by(driver.engine, None)
    plain, _, _ = run(driver, prompt, new)
    draft_by(driver.engine, Timed(8, 16, runs_ahead=False))
    drafted, steps, _ = run(driver, prompt, new)
    assert drafted.tokens == plain.tokens
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert steps * 2 <= new


def test_a_predicted_text_with_an_edit_takes_half_the_steps_and_is_the_same(
    driver: Driver, edits: list[tuple[list[int], list[int]]]
) -> None:
    prompt, new = edits[1][0][:40], 40  # an answer that does not repeat itself
    draft_by(driver.engine, None)
    plain, _, _ = run(driver, prompt, new)
    prediction = [*plain.tokens[:25], *range(1000, 1003), *plain.tokens[26:]]
    draft_by(driver.engine, Timed(8, 16, runs_ahead=False))
    drafted, steps, _ = run(driver, prompt, new, prediction)
    assert drafted.tokens == plain.tokens
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert steps * 2 <= new


@pytest.mark.full
def test_second_edits_are_faster_by_half(driver: Driver, edits: list[tuple[list[int], list[int]]]) -> None:
    assert isinstance(driver.engine, TorchEngine)
    drafter = Drafter(8, 16, runs_ahead=False)
    seconds = {True: 0.0, False: 0.0}
    for prompt, _ in edits * 2:
        for drafts in (False, True):
            draft_by(driver.engine, drafter if drafts else None)
            seconds[drafts] += run(driver, prompt, 200)[2]
    print(f"{seconds[False] / seconds[True]:.2f} × the tokens per second")
    assert seconds[False] > 1.5 * seconds[True]
