"""The KV ledger rejects blocks with a wrong owner or wrong contents."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace

import pytest
from checked_echo import CheckedEcho
from engine_driver import Driver

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode, Stopping, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import NewSequence, Orders
from text_generation_shard.engines.echo import EchoEngine
from text_generation_shard.step.table import SequenceTable

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


GROUPS = (CacheGroup(8), CacheGroup(4, 33))


def table_with_a_window() -> SequenceTable:
    return SequenceTable(EchoEngine.build(ShardConfig(engine="echo")).info, GROUPS)


@pytest.mark.parametrize(
    ("further", "problem"),
    [
        ((), "it has KV blocks of 1 groups, the cache has 2"),
        (((0, (1, 2, 3)), (0, (1,))), "it has KV blocks of 3 groups, the cache has 2"),
        (((0, (1, 4, 3)),), "a KV block is not one of 4"),
        (((2, (1, 2)),), "a KV block of group 1 is missing"),
        (((4_000_000_000, ()),), "a KV block of group 1 is missing"),
        (((0, (1, 2)),), "a KV block of group 1 is missing"),
        (((0, (1, 2, 3)),), None),
    ],
)
def test_blocks_of_a_window_group_are_checked(
    further: tuple[tuple[int, tuple[int, ...]], ...], problem: str | None
) -> None:
    # The next token is at position 48, so positions from 16 on are needed.
    new = NewSequence(0, (5,) * 60, Stopping(4), blocks=(0, 1, 2, 3), computed_tokens=48, further_blocks=further)
    if problem is None and further:
        new = replace(new, further_blocks=((1, further[0][1][1:]),))
    failures = table_with_a_window().apply(Orders(1, placements=(new,)))
    assert [failure.message[: len(problem or "")] for failure in failures] == ([] if problem is None else [problem])


def test_a_sequence_ends_where_the_blocks_of_a_group_end() -> None:
    table = table_with_a_window()
    new = NewSequence(0, (5,) * 40, Stopping(20), blocks=(0, 1, 2, 3), further_blocks=((0, (0, 1)),))
    assert not table.apply(Orders(1, placements=(new,), prefill=((0, 32),)))
    table.begin(table.rows())
    more = Orders(2, further_allocations=(((0, (2,)),),), prefill=((0, 8),))
    assert not table.apply(more)
    rows = table.rows()
    assert [(row.start, row.length, row.samples) for row in rows.others] == [(32, 8, True)]
    assert table.sequences[0].end == 48
    past = Orders(3, further_allocations=((), ((0, (1,)),)))
    assert [failure.message for failure in table.apply(past)] == ["there is no group 2 of KV blocks"]


def test_a_window_ledger_finds_a_block_that_is_needed_and_was_given_away() -> None:
    engine = CheckedEcho.build(ShardConfig(engine="echo"), further_groups=GROUPS[1:])
    engine.warm_up(WarmUpLimits(max_batch_total_tokens=128))
    first = NewSequence(0, PROMPT, Stopping(9), blocks=(0, 1, 2, 3), further_blocks=((0, (0, 1, 2, 3)),))
    engine.apply(Orders(1, placements=(first,), prefill=((0, 40),)))
    engine.step()
    # It needs positions from 8 on: all blocks.
    other = NewSequence(1, OTHER, Stopping(9), blocks=(4, 5, 6, 7), further_blocks=((0, (0, 1, 2, 3)),))
    engine.apply(Orders(2, placements=(other,), prefill=((1, 16),)))
    with pytest.raises(AssertionError, match="slot 0 needs position 0, and block 0 holds another text"):
        engine.step()
