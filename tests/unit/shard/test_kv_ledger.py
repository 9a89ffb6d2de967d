"""The KV ledger rejects blocks with a wrong owner or wrong contents."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import pytest
from checked_echo import CheckedEcho
from engine_driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_ledger import KVLedger

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


@dataclass(eq=False)
class Held:
    """A sequence of the ledger."""

    tokens: list[int]
    blocks: list[int]
    computed: int
    adapter: str = ""
    is_held: bool = True


@settings(max_examples=150)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "allocate", "step", "end"]),
            st.lists(st.integers(0, 3), min_size=1, max_size=2),
            st.lists(st.just(1), min_size=2, max_size=8),
            st.integers(0, 7),
        ),
        min_size=20,
        max_size=40,
    )
)
def test_the_ledger_agrees_with_a_record_of_every_token(moves: list[tuple[str, list[int], list[int], int]]) -> None:
    """Sequences on four blocks of four tokens."""
    ledger, live = KVLedger(4, 4), list[Held]()
    cells: dict[tuple[int, int], int] = {}
    for move, blocks, tokens, number in moves:
        taken = {block for holder in live for block in holder.blocks}
        if move == "admit":
            computed = min(number, len(tokens) - 1, len(blocks) * 4)
            right = all(cells.get((blocks[i // 4], i % 4)) == tokens[i] for i in range(computed))
            fits = right and len(set(blocks)) == len(blocks) and taken.isdisjoint(blocks[computed // 4 :])
            new = NewSequence(0, tuple(tokens), Stopping(1), blocks=tuple(blocks), computed_tokens=computed)
            assert (ledger.new_sequence_problem(new) is None) is fits
            if fits:
                live.append(Held(tokens, blocks, computed))
                ledger.admit(live[-1])
                for index in range(computed, len(blocks) * 4):
                    cells.pop((blocks[index // 4], index % 4), None)
        elif live:
            holder = live[number % len(live)]
            if move == "end":
                ledger.end(holder)
                live.remove(holder)
            elif move == "allocate":
                fits = len(set(blocks)) == len(blocks) and taken.isdisjoint(blocks)
                assert (ledger.allocation_problem(blocks) is None) is fits
                if fits:
                    holder.blocks = holder.blocks + blocks
                    ledger.allocate(holder, blocks)
                    cells = {place: token for place, token in cells.items() if place[0] not in blocks}
            else:
                for index in range(holder.computed, min(len(holder.tokens), len(holder.blocks) * 4)):
                    cells[holder.blocks[index // 4], index % 4] = holder.tokens[index]
                    holder.computed += 1
