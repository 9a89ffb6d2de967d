"""The rules of the prefix tree, one at a time. Combinations: tests/property/test_prefix_tree.py."""

from __future__ import annotations

import pytest
from tree_keys import SALT, cache, evict_all, find, key

from text_generation_router.scheduling.prefix_tree import Node, PrefixTree


@pytest.mark.parametrize(
    ("asked", "blocks"),
    [
        ([], []),
        ([9, 9], []),
        ([1, 2], [10]),
        ([1, 2, 3, 4], [10, 11]),
        ([1, 2, 3, 9], [10]),
        ([1, 2, 3, 4, 5, 6], [10, 11, 12]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], [10, 11, 12, 13]),
        ([1, 2, 3, 4, 50, 60, 7, 8], [10, 11, 22]),
        ([1, 2, 3, 4, 50, 60, 70, 80, 1, 1], [10, 11, 22, 23]),
        ([1, 2, 3, 4, 50, 61], [10, 11]),
        ([3, 4], []),
    ],
)
def test_the_longest_cached_prefix_is_found_in_whole_blocks(asked: list[int], blocks: list[int]) -> None:
    tree = PrefixTree(2)
    cache(tree, [1, 2, 3, 4, 5, 6, 7, 8], [10, 11, 12, 13])
    own = cache(tree, [1, 2, 3, 4, 50, 60, 70, 80], [20, 21, 22, 23])
    assert own == [20, 21]
    assert tree.peek(SALT, key(asked)) == 2 * len(blocks)
    assert find(tree, asked) == blocks
    assert tree.cached_blocks == tree.evictable_blocks == 6


@pytest.mark.parametrize("shared", [1, 2, 3, 31, 32, 33, 63, 64, 99, 100])
def test_the_end_of_a_prefix_is_found_anywhere_in_a_long_run(shared: int) -> None:
    tree = PrefixTree(4)
    cache(tree, range(400), range(100))
    asked = [*range(shared * 4), *([7] * 400)]
    assert tree.peek(SALT, key(asked)) == shared * 4
    assert find(tree, asked) == list(range(shared))


def test_blocks_that_differ_in_their_last_byte_are_distinct() -> None:
    tree = PrefixTree(2)
    cache(tree, [1, 2], [5])
    assert tree.peek(SALT, key([1, 2 + (1 << 24)])) == 0
    assert tree.peek(SALT, key([1 + (1 << 31), 2])) == 0


def test_a_peek_does_not_count_as_a_use() -> None:
    tree = PrefixTree(1)
    cache(tree, [1], [10])
    cache(tree, [2], [20])
    assert tree.peek(SALT, key([1])) == 1
    assert tree.peek("another", key([1])) == 0
    assert tree.evict(1) == [10]


def test_a_prompt_computed_twice_at_once_is_kept_once() -> None:
    tree = PrefixTree(1)
    first, _ = tree.acquire(SALT, key([1, 2, 3]))
    second, _ = tree.acquire(SALT, key([1, 2, 3, 4]))
    first, present = tree.extend(first, key([1, 2, 3]), [10, 11, 12])
    assert present == 0
    second, present = tree.extend(second, key([1, 2, 3, 4]), [20, 21, 22, 23])
    assert present == 3
    assert find(tree, [1, 2, 3, 4]) == [10, 11, 12, 23]
    tree.release(second)
    assert tree.evict(9) == [23]
    tree.release(first)
    assert tree.evict(9) == [10, 11, 12]


@pytest.mark.parametrize(("run", "present"), [([1, 2, 3], 3), ([1, 2], 2), ([1, 2, 9], 2), ([1], 1), ([], 0), ([8], 0)])
def test_a_run_is_locked_to_its_end_and_no_further(run: list[int], present: int) -> None:
    tree = PrefixTree(1)
    cache(tree, [1, 2, 3], [10, 11, 12])
    root, _ = tree.acquire(SALT, b"")
    mine = [20, 21, 22][: len(run)]
    node, there = tree.extend(root, key(run), mine)
    assert there == present
    assert tree.evict(9) == [10, 11, 12][present:]
    assert tree.cached_blocks == len(run)
    assert tree.evictable_blocks == 0
    tree.release(node)
    assert evict_all(tree) == mine[present:] + [10, 11, 12][:present]


def test_extend_moves_the_lock() -> None:
    tree = PrefixTree(1)
    cache(tree, [1, 2, 3], [10, 11, 12])
    node, _ = tree.acquire(SALT, key([1]))
    node, present = tree.extend(node, key([2, 3]), [21, 22])
    assert present == 2
    assert tree.evictable_blocks == 0
    tree.release(node)
    assert tree.evictable_blocks == 3


def test_a_long_answer_added_block_by_block_is_one_run() -> None:
    tree = PrefixTree(1)
    node, _ = tree.acquire(SALT, b"")
    grown: set[Node] = set()
    for token in range(1000):
        node, _ = tree.extend(node, key([token]), [token])
        grown.add(node)
    tree.release(node)
    assert len(grown) == 1
    assert find(tree, range(1000)) == list(range(1000))


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    tree = PrefixTree(1)
    for token in (1, 2, 3):
        cache(tree, [token], [token * 10])
    find(tree, [1])
    assert [tree.evict(1) for _ in range(3)] == [[20], [30], [10]]


def test_use_of_a_run_counts_for_its_prefix() -> None:
    tree = PrefixTree(1)
    cache(tree, [1], [10])
    cache(tree, [1, 2, 3], [10, 11, 12])
    find(tree, [1])  # a boundary after the first block
    cache(tree, [5], [50])
    find(tree, [1, 2, 3])
    cache(tree, [6], [60])
    assert [tree.evict(count) for count in (1, 2, 1, 1)] == [[50], [11, 12], [10], [60]]


@pytest.mark.parametrize(
    ("count", "taken", "left"),
    [
        (-1, [], [10, 11, 12, 13]),
        (0, [], [10, 11, 12, 13]),
        (1, [13], [10, 11, 12]),
        (3, [11, 12, 13], [10]),
        (4, [10, 11, 12, 13], []),
        (5, [10, 11, 12, 13, 23], []),
    ],
)
def test_eviction_stops_at_the_requested_count(count: int, taken: list[int], left: list[int]) -> None:
    tree = PrefixTree(2)
    cache(tree, range(8), [10, 11, 12, 13])
    cache(tree, range(100, 108), [20, 21, 22, 23])
    assert tree.evict(count) == taken
    assert tree.cached_blocks == tree.evictable_blocks == 8 - len(taken)
    assert find(tree, range(8)) == left


def test_misuse_is_caught() -> None:
    tree = PrefixTree(2)
    node, _ = tree.acquire(SALT, b"")
    with pytest.raises(AssertionError, match="covers its blocks"):
        tree.extend(node, key([1, 2, 3]), [1, 2])
    tree.release(node)
    with pytest.raises(AssertionError, match="released once"):
        tree.release(node)
    with pytest.raises(AssertionError, match="only a locked node"):
        tree.extend(node, key([1, 2]), [1])
