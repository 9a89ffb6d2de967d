"""The KV ledger rejects blocks with a wrong owner or wrong contents."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import pytest
from checked_echo import CheckedEcho
from engine_driver import Driver

from text_generation_proto.values import FailureCode, Stopping, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import NewSequence, Orders

PROMPT = tuple(range(7, 47))
OTHER = (99,) * 40


@pytest.fixture
def driver() -> Driver:
    engine = CheckedEcho.build(ShardConfig(engine="echo"))
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=1024)))


def admitted(driver: Driver, prompt: Tokens[int], blocks: Tokens[int], computed: int = 0, slot: int = 9) -> str | None:
    """Admit a sequence without the driver, drop it, and return its problem, or None."""
    admission = NewSequence(slot, tuple(prompt), Stopping(4), blocks=tuple(blocks), computed_tokens=computed)
    failures = driver.engine.apply(Orders(98, placements=(admission,)))
    driver.engine.apply(Orders(99, release=(slot,)))
    assert all((failure.slot, failure.code) == (slot, FailureCode.INVALID) for failure in failures)
    return failures[0].message if failures else None


@pytest.mark.parametrize("index", [0, 15, 16, 31])
def test_one_wrong_token(driver: Driver, index: int) -> None:
    first = driver.admit(PROMPT, 30)
    driver.step()
    prompt = list(PROMPT)
    prompt[index] += 1
    blocks = (*first.blocks[:2], 3)
    wrong = f"the KV blocks given do not hold the prompt: token {index}, in block {blocks[index // 16]}, is another"
    assert admitted(driver, prompt, blocks, computed=32) == wrong
    assert admitted(driver, PROMPT, blocks, computed=32) is None
    prompt[index] = PROMPT[index]
    prompt[-1] += 1
    assert admitted(driver, prompt, blocks, computed=32) is None


@pytest.mark.parametrize("whose", ["another's", "its own", "twice"])
def test_an_added_block_that_is_held_fails_its_sequence(driver: Driver, whose: str) -> None:
    first, second = driver.admit(PROMPT, 30), driver.admit(PROMPT, 30, allocated=48)
    driver.step()
    blocks = {"another's": (first.blocks[0],), "its own": (second.blocks[0],), "twice": (3, 3)}[whose]
    (failure,) = driver.engine.apply(Orders(98, allocations=((second.slot, blocks),)))
    assert (failure.slot, failure.code) == (second.slot, FailureCode.INVALID)
    driver.streams.pop(second.slot)
    driver.run()
    assert first.failure is None
    assert len(first.tokens) == 30
