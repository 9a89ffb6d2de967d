"""The KV ledger rejects blocks with a wrong owner or wrong contents."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

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


def test_a_block_holds_only_computed_tokens(driver: Driver) -> None:
    first = driver.admit(PROMPT, 30, chunk=20)
    driver.step()
    assert admitted(driver, PROMPT, (first.blocks[0], 3, 4), computed=16) is None
    assert admitted(driver, PROMPT, (*first.blocks[:2], 3), computed=32) is not None
    driver.step()
    assert admitted(driver, PROMPT, (*first.blocks[:2], 3), computed=32) is None


def test_new_tokens_are_held_too(driver: Driver) -> None:
    first = driver.admit(PROMPT, 30)
    for _ in range(9):
        driver.step()
    # The prompt and eight of the nine new tokens are computed: exactly three blocks.
    turn = (*PROMPT, *first.tokens, 5, 6)
    assert admitted(driver, turn, (*first.blocks[:3], 3), computed=48) is None
    driver.run()
    assert admitted(driver, turn, (*first.blocks[:3], 3), computed=48) is None


def test_a_block_with_a_writer_or_readers_is_rejected(driver: Driver) -> None:
    first = driver.admit(PROMPT, 3)
    driver.step()
    assert admitted(driver, OTHER, (3, 4, first.blocks[1])) == f"KV block {first.blocks[1]} is held already"
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


def test_a_block_twice_in_one_table_is_rejected(driver: Driver) -> None:
    assert admitted(driver, PROMPT, (3, 4, 3)) == "a KV block is given twice"


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


def test_an_added_block_is_held_until_its_sequence_ends(driver: Driver) -> None:
    stream = driver.admit(PROMPT, 30, granted=48)
    driver.step()
    driver.grant(stream, 16)
    driver.step()
    assert admitted(driver, OTHER, (3, 4, stream.blocks[-1])) is not None
    driver.release(stream)
    driver.step()
    assert admitted(driver, OTHER, (3, 4, stream.blocks[-1])) is None


def test_a_new_session_starts_with_empty_blocks(driver: Driver) -> None:
    first = driver.admit(PROMPT, 30)
    driver.step()
    driver.engine.reset()
    assert admitted(driver, PROMPT, (*first.blocks[:2], 3), computed=32) is not None
    assert admitted(driver, PROMPT, first.blocks) is None


class Sharer:
    """Sequences on four blocks of four tokens; the contents of the blocks are tracked token by token."""

    def __init__(self) -> None:
        self.ledger = KVLedger(4, 4)
        self.cells: dict[tuple[int, int], int] = {}
        self.live: list[tuple[Held, int]] = []


class Held:
    """A sequence of the ledger."""

    def __init__(self, tokens: list[int], blocks: list[int], computed: int) -> None:
        self.tokens, self.blocks, self.computed = tokens, blocks, computed


@settings(max_examples=150)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "step", "end"]),
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
    world = Sharer()
    for move, blocks, tokens, number in moves:
        if move == "admit":
            computed = min(number, len(tokens) - 1, len(blocks) * 4)
            own = blocks[computed // 4 :]
            held = {block for holder, first in world.live for block in holder.blocks[first:]}
            read = {block for holder, first in world.live for block in holder.blocks[:first]}
            right = all(world.cells.get((blocks[i // 4], i % 4)) == tokens[i] for i in range(computed))
            expected = right and len(set(blocks)) == len(blocks) and not (held | read) & set(own)
            admission = NewSequence(0, tuple(tokens), Stopping(1), blocks=tuple(blocks), computed_tokens=computed)
            assert (world.ledger.new_sequence_problem(admission) is None) is expected
            if expected:
                holder = Held(list(tokens), list(blocks), computed)
                world.ledger.admit(holder)
                world.live.append((holder, computed // 4))
                for block in own[1 if computed % 4 else 0 :]:
                    for offset in range(4):
                        world.cells.pop((block, offset), None)
                if computed % 4:
                    for offset in range(computed % 4, 4):
                        world.cells.pop((own[0], offset), None)
        elif world.live:
            holder, _ = world.live[number % len(world.live)]
            if move == "end":
                world.ledger.end(holder)
                world.live = [(other, first) for other, first in world.live if other is not holder]
            else:
                for _ in range(len(tokens)):
                    if holder.computed < min(len(holder.tokens), len(holder.blocks) * 4):
                        index = holder.computed
                        world.cells[holder.blocks[index // 4], index % 4] = holder.tokens[index]
                        holder.computed += 1
