"""The pool of a window group, and prefixes that the tree finds only as far as it accepts them."""

from __future__ import annotations

from scheduler_checks import check_pool, check_tree, nodes_of
from scheduler_rig import Rig, a_policy
from tree_keys import key

from text_generation_proto.cache_groups import CacheGroup
from text_generation_router.scheduling.prefix_tree import PrefixTree
from text_generation_router.scheduling.window_pool import HeldBlocks, WindowPool

SIZE = 16
WINDOW = 33
"""A token needs the two blocks before its own, if it is the first of one."""
PROMPT = key(range(10 * SIZE))


class Cache:
    """A tree with one window group, and sequences that compute all of a prompt of ten blocks block by block."""

    def __init__(self, blocks: int) -> None:
        self.pool = WindowPool(CacheGroup(blocks, WINDOW), SIZE)
        self.tree = PrefixTree(SIZE, [self.pool])
        self.next_block = 0

    def hit(self, prompt: bytes = PROMPT) -> int:
        """Return the blocks of the longest prefix that is found."""
        return self.tree.peek("", prompt) // SIZE

    def compute(self, prompt: bytes = PROMPT) -> int:
        """Compute a prompt and end; return the blocks that were found."""
        prefix = self.tree.find("", prompt)
        node, blocks = self.tree.lock(prefix)
        count = len(prompt) // (4 * SIZE)
        held = self.pool.hold(prefix.further[0], len(blocks), count * SIZE)
        for block in range(len(blocks), count):
            self.pool.extend(held, block + 1)
            run = prompt[block * 4 * SIZE : (block + 1) * 4 * SIZE]
            own = [held.between(block, block + 1)]
            node, _ = self.tree.extend(node, run, [self.next_block], further=own)
            self.next_block += 1
            if (position := (block + 1) * SIZE) >= held.needed_until:
                self.pool.give_back(held, position)
            assert len(held.blocks) <= 3
        self.pool.release(held.blocks)
        self.tree.release(node)
        cached = [block for each in nodes_of(self.tree) for block in each.further[0]]
        check_pool(self.pool, cached, [])
        check_tree(self.tree, [])
        return len(blocks)


def test_all_of_a_prompt_is_found_while_there_is_memory() -> None:
    cache = Cache(20)
    assert cache.compute() == 0
    assert [cache.hit(PROMPT[: blocks * 4 * SIZE]) for blocks in range(11)] == list(range(11))
    assert cache.compute() == 10


def test_the_end_of_a_prompt_outlives_what_is_before_it() -> None:
    cache = Cache(10)
    cache.compute()
    other = key(range(1000, 1000 + 6 * SIZE))
    cache.compute(other)  # takes six blocks
    assert [cache.hit(PROMPT[: blocks * 4 * SIZE]) for blocks in (10, 9, 8, 7, 5, 1)] == [10, 9, 8, 0, 0, 0]
    assert cache.hit(other) == 6


def test_a_prefix_is_usable_again_once_its_blocks_were_computed_again() -> None:
    cache = Cache(6)
    cache.compute()
    assert cache.hit(PROMPT[: 5 * 4 * SIZE]) == 0
    assert cache.compute(PROMPT[: 5 * 4 * SIZE]) == 0
    assert cache.hit(PROMPT[: 5 * 4 * SIZE]) == 5
    assert cache.tree.cached_blocks == 10


def test_a_reused_prefix_outlives_others() -> None:
    cache = Cache(12)
    system = PROMPT[: 4 * 4 * SIZE]
    cache.compute(system)
    for user in range(1, 6):
        assert cache.compute(system + key(range(1000 * user, 1000 * user + 6 * SIZE))) == 4


def test_blocks_leave_with_their_positions() -> None:
    cache = Cache(20)
    cache.compute()
    assert len(cache.tree.evict(3)) == 3
    assert cache.pool.available == 20
    assert len(cache.pool.extend(HeldBlocks(), 13)) == 13, "ten of twenty were free, three are again"
    assert cache.hit() == 7


def test_answers_to_come_take_no_room_of_a_window_group() -> None:
    """Their sequences hardly grow there."""
    rig = Rig(a_policy(max_batch_prefill_tokens=1000), blocks=4000, windows=(CacheGroup(400, 64),))
    for _ in range(5):
        rig.submit(100, new=2400)
    rig.turns(4)
    assert len(rig.placed()) == 5
