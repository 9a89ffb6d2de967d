"""The checkpoints of states that sequences leave, and the order in which they are evicted."""

from __future__ import annotations

import pytest
from scheduler_checks import check_scheduler
from scheduler_rig import BLOCK, Rig, a_policy, words

from text_generation_proto.cache_groups import CacheGroup
from text_generation_router.scheduling.checkpoints import MIN_GAIN, SPACING, StateCheckpoint, checkpoints
from text_generation_router.scheduling.messages import SchedulerOutput
from text_generation_router.scheduling.state_pool import StatePool

FAR = 10 * MIN_GAIN


@pytest.mark.parametrize(
    ("length", "turn_ends", "branch", "cached", "kept", "spare"),
    [
        pytest.param(100, (), 0, 0, [96], [], id="the last whole block"),
        pytest.param(96, (), 0, 0, [80], [], id="one token is left to compute"),
        pytest.param(100, (93,), 0, 0, [80], [], id="the end of the turn"),
        pytest.param(100, (93,), 0, 80, [], [], id="it is there"),
        pytest.param(100, (30, 93), 0, 0, [16, 80], [], id="two ends"),
        pytest.param(
            FAR, (MIN_GAIN, FAR), 2 * MIN_GAIN - 16, 0, [MIN_GAIN, FAR - 16], [], id="a branch near one of two"
        ),
        pytest.param(15, (), 0, 0, [], [], id="no whole block"),
        pytest.param(FAR + 9, (), MIN_GAIN, 0, [MIN_GAIN, FAR], [], id="a branch"),
        pytest.param(FAR + 9, (), MIN_GAIN, 16, [FAR], [], id="a branch near the cached prefix"),
        pytest.param(FAR + 9, (), FAR - 32, 0, [FAR], [], id="a branch near the end"),
        pytest.param(FAR + 9, (100,), 0, 0, [96], [FAR], id="new tokens from before a preemption"),
        pytest.param(2 * SPACING, (), 0, 0, [2 * SPACING - 16], [SPACING], id="a long prompt"),
    ],
)
def test_checkpoints(
    length: int, turn_ends: tuple[int, ...], branch: int, cached: int, kept: list[int], spare: list[int]
) -> None:
    wanted = checkpoints(length, turn_ends, branch, cached, 16)
    assert [each.position for each in wanted] == sorted([*kept, *spare], reverse=True)
    assert {each.position for each in wanted if each.is_spare} == set(spare)


class Chats(Rig):
    """A replica with a few states."""

    def __init__(self, states: int, **options: object) -> None:
        super().__init__(a_policy(), windows=(CacheGroup(states, is_state=True),), **options)  # type: ignore[arg-type]

    def hit(self, prompt: tuple[int, ...], new: int = 2) -> int:
        """Serve a prompt; return the tokens found in the cache."""
        return self.cached(self.serve(prompt, new))


def test_of_a_chat_the_last_checkpoint_stays_longest_and_of_branches_all() -> None:
    rig = Chats(states=5)
    turns = [words(1, BLOCK * count + 1) for count in range(1, 9)]
    assert [rig.hit(turn) for turn in turns] == [BLOCK * count for count in range(8)]
    # Others take the blocks of the earlier turns.
    for number in range(2, 5):
        rig.hit(words(number, BLOCK + 1))
    assert rig.hit(turns[-1]) == 8 * BLOCK
    # Two prompts continued from the second one.
    for number in range(5, 7):
        assert rig.hit((*words(2, BLOCK), *words(number, BLOCK + 1))) == BLOCK
    for number in range(10, 12):
        rig.hit(words(number, BLOCK + 1))
    assert rig.hit((*words(2, BLOCK), 7)) == BLOCK
    check_scheduler(rig.scheduler)


def test_a_checkpoint_where_another_turn_can_continue_is_replaced_by_that_turn() -> None:
    """The calls of a tool follow the question with reasoning that the next question drops."""
    rig = Chats(states=8)
    question, end = words(1, 4 * BLOCK + 1), 4 * BLOCK
    rig.hit(question)
    for number in range(1, 5):
        calls = (*question, *words(100, 2 * BLOCK * number))
        ends = (end, len(calls)) if number == 1 else ()
        assert rig.cached(rig.serve(calls, 2, turn_ends=ends)) == end + 2 * BLOCK * (number - 1)
        for other in range(2):
            rig.hit(words(1000 + 10 * number + other, BLOCK + 1))
    following = (*question, *words(200, 3 * BLOCK))
    assert rig.hit(following) == end
    # The next question has replaced it.
    rig.hit(words(2000, BLOCK + 1))
    assert (rig.hit((*following, 7)), rig.hit((*question, 7))) == (7 * BLOCK, 0)
    check_scheduler(rig.scheduler)


def test_a_shared_prompt_is_computed_once_where_a_checkpoint_can_still_be_left() -> None:
    rig = Chats(states=9)
    shared = words(1, 6 * BLOCK)
    prompts = [(*shared, *words(number, 9)) for number in range(2, 5)]
    numbers = [rig.submit(prompt) for prompt in prompts]
    rig.until_idle()
    assert [rig.cached(number) for number in numbers] == [0, 6 * BLOCK, 6 * BLOCK]


def test_as_many_sequences_run_as_there_are_states() -> None:
    rig = Chats(states=3)
    for _ in range(5):
        rig.submit(20, new=4)
    rig.scheduler.dispatch()
    assert rig.replica().occupied_slots == 3
    assert rig.replica().cache.usage["state"] == (3, 3)
    rig.until_idle()
    assert len(rig.finished) == 5


def test_a_checkpoint_is_held_until_the_chunk_that_reads_it_is_computed() -> None:
    """Its block is free for no other sequence before."""
    pool = StatePool(CacheGroup(4, is_state=True), BLOCK)
    held = pool.start((), [StateCheckpoint(2 * BLOCK)])
    (own,) = held.blocks
    assert not pool.chunk_scheduled(held, 2 * BLOCK)
    ((position, block),) = pool.chunk_scheduled(held, 3 * BLOCK)
    assert position == 2 * BLOCK
    assert block != own.number
    pool.settle(held, 2 * BLOCK)
    assert own in held.blocks
    pool.settle(held, 2 * BLOCK + 1)
    assert own not in held.blocks


def test_a_chunk_leaves_a_checkpoint_before_its_last_tokens_and_one_at_its_end() -> None:
    rig = Chats(states=9)

    def orders_of(blocks: int, *turn_ends: int) -> list[SchedulerOutput]:
        rig.orders.clear()
        rig.serve(words(1, blocks * BLOCK + 5), 2, turn_ends=tuple(end * BLOCK for end in turn_ends))
        return [each for _, each in rig.orders if each.prefill]

    (first,) = orders_of(3)
    assert [chunk for _, chunk in first.prefill] == [3 * BLOCK + 5]
    (((_, (position, after)),),) = first.further_allocations
    (own,) = first.placements[0].further_blocks[0][1]
    assert position == 3 * BLOCK
    assert after != own
    # Of two, the second one ends a chunk.
    ordered = orders_of(6, 4, 6)
    assert ordered[0].placements[0].cached_tokens == 3 * BLOCK
    assert [chunk for each in ordered for _, chunk in each.prefill] == [3 * BLOCK, 5]
    assert [[at for _, (at, _) in each.further_allocations[0]] for each in ordered] == [[4 * BLOCK], [6 * BLOCK]]
    assert rig.hit(words(1, 6 * BLOCK + 9)) == 6 * BLOCK
    check_scheduler(rig.scheduler)


def test_a_chunk_leaves_no_checkpoint_without_a_free_block() -> None:
    pool = StatePool(CacheGroup(1, is_state=True), BLOCK)
    held = pool.start((), [StateCheckpoint(2 * BLOCK)])
    (own,) = held.blocks
    assert not pool.chunk_scheduled(held, 3 * BLOCK)
    assert [*held.blocks] == [own]
    assert not held.kept


def test_long_chats_keep_their_checkpoints_among_short_prompts_until_they_end() -> None:
    """By last use alone, the short ones would evict them."""
    rig = Chats(states=6, blocks=1000)
    for ended in range(3):
        for turn in range(6):
            hits = []
            for chat in range(4):
                rig.hit(words(100 + 100 * ended + 10 * turn + chat, BLOCK + 1))
                hits.append(rig.hit(words(10 * ended + chat + 1, BLOCK * (10 + turn) + 1)))
        assert hits == [BLOCK * (10 + turn - 1)] * 4


def test_the_blocks_of_a_chat_stay_until_as_many_others_are_evicted_as_it_found() -> None:
    """By last use alone, the short prompts would evict its last block, and with it its only checkpoint."""
    rig = Chats(states=40, blocks=60)
    chat = words(1, 30 * BLOCK + 1)
    rig.hit(chat)
    assert rig.hit(chat) == 30 * BLOCK
    for number in range(2, 14):
        rig.hit(words(number, 4 * BLOCK + 1))
    assert rig.hit(chat) == 30 * BLOCK
    for number in range(20, 40):
        rig.hit(words(number, 4 * BLOCK + 1))
    assert rig.hit(chat) == 0
