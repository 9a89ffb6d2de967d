"""The KV ledger rejects blocks with a wrong owner or wrong contents."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import pytest
from engine_driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from text_generation_proto.values import FailureCode, Stopping, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import NewSequence, Orders
from text_generation_shard.engines import build_engine
from text_generation_shard.step.kv_ledger import KVLedger

PROMPT = tuple(range(7, 47))
OTHER = (99,) * 40


@pytest.fixture
def driver() -> Driver:
    engine = build_engine(ShardConfig(engine="echo"))
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=1024)))


def admitted(driver: Driver, prompt: Tokens[int], blocks: Tokens[int], computed: int = 0, slot: int = 9) -> str | None:
    """Admit a sequence without the driver, drop it, and return its problem, or None."""
    admission = NewSequence(slot, tuple(prompt), Stopping(4), blocks=tuple(blocks), computed_tokens=computed)
    failures = driver.engine.apply(Orders(98, admit=(admission,)))
    driver.engine.apply(Orders(99, release=(slot,)))
    assert all((failure.slot, failure.code) == (slot, FailureCode.INVALID) for failure in failures)
    return failures[0].message if failures else None


def test_blocks_that_were_never_computed(driver: Driver) -> None:
    message = "the KV blocks given do not hold the prompt: token 0, in block 3, is another"
    assert admitted(driver, PROMPT, (3, 4, 5), computed=32) == message
    assert driver.engine.running == 0


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


def test_new_tokens_are_held_until_the_session_ends(driver: Driver) -> None:
    first = driver.admit(PROMPT, 30)
    for _ in range(9):
        driver.step()
    # The prompt and eight of the nine new tokens are computed: exactly three blocks.
    turn = (*PROMPT, *first.tokens, 5, 6)
    blocks = (*first.blocks[:3], 3)
    assert admitted(driver, turn, blocks, computed=48) is None
    driver.run()
    assert admitted(driver, turn, blocks, computed=48) is None
    driver.engine.reset()
    assert admitted(driver, turn, blocks, computed=48) is not None
    assert admitted(driver, PROMPT, first.blocks) is None


def test_a_block_with_a_writer_or_readers_is_rejected(driver: Driver) -> None:
    first = driver.admit(PROMPT, 6, granted=40)
    driver.step()
    driver.grant(first, 16)
    driver.step()
    for block in first.blocks[1:]:
        assert admitted(driver, OTHER, (3, 4, block)) == f"KV block {block} is held already"
    driver.run()
    assert first.failure is None
    shared = first.blocks[:2]
    readers = [driver.admit(PROMPT, 20, shared=shared, computed_tokens=32) for _ in range(2)]
    driver.step()
    for reader in readers:
        assert admitted(driver, OTHER, (3, 4, shared[0])) == f"KV block {shared[0]} is held already"
        driver.release(reader)
        driver.step()
    assert admitted(driver, OTHER, (3, 4, shared[0])) is None


@pytest.mark.parametrize("whose", ["another's", "its own", "twice"])
def test_an_added_block_that_is_held_fails_its_sequence(driver: Driver, whose: str) -> None:
    first, second = driver.admit(PROMPT, 30), driver.admit(PROMPT, 30, granted=48)
    driver.step()
    blocks = {"another's": (first.blocks[0],), "its own": (second.blocks[0],), "twice": (3, 3)}[whose]
    (failure,) = driver.engine.apply(Orders(98, grants=((second.slot, blocks),)))
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


@settings(max_examples=150)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "grant", "step", "end"]),
            st.lists(st.integers(0, 3), min_size=1, max_size=2),
            st.lists(st.just(1), min_size=2, max_size=8),
            st.integers(0, 7),
        ),
        min_size=20,
        max_size=40,
    )
)
def test_the_ledger_agrees_with_a_record_of_every_token(
    moves: list[tuple[str, list[int], list[int], int]],
) -> None:
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
            elif move == "grant":
                fits = len(set(blocks)) == len(blocks) and taken.isdisjoint(blocks)
                assert (ledger.grant_problem(blocks) is None) is fits
                if fits:
                    holder.blocks = holder.blocks + blocks
                    ledger.grant(holder, blocks)
                    cells = {place: token for place, token in cells.items() if place[0] not in blocks}
            else:
                for index in range(holder.computed, min(len(holder.tokens), len(holder.blocks) * 4)):
                    cells[holder.blocks[index // 4], index % 4] = holder.tokens[index]
                    holder.computed += 1
