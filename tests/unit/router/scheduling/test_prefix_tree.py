"""Long runs and owners of the prefix tree. All operations against a flat model: tests/property/test_prefix_tree.py."""

from __future__ import annotations

import pytest
from scheduler_checks import check_tree
from tree_keys import SALT, cache, find, key

from text_generation_router.scheduling.prefix_node import Node
from text_generation_router.scheduling.prefix_tree import PrefixTree


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


def test_a_long_answer_added_block_by_block_is_one_run() -> None:
    tree = PrefixTree(1)
    node, _ = tree.lock(tree.find(SALT, b""))
    grown: set[Node] = set()
    for token in range(1000):
        node, _ = tree.extend(node, key([token]), [token])
        grown.add(node)
    tree.release(node)
    assert len(grown) == 1
    assert find(tree, range(1000)) == list(range(1000))


def test_an_owner_knows_what_it_computed_or_reused_and_nothing_that_others_added() -> None:
    tree = PrefixTree(1)
    root, _ = tree.lock(tree.find(SALT, b""))
    first, _ = tree.extend(root, key((1, 2, 3)), [0, 1, 2], "a")
    tree.claim(first, "a")
    lock, blocks = tree.lock(tree.find(SALT, key((1, 2))))
    assert (len(blocks), tree.known_blocks(lock, "b"), tree.known_blocks(lock, "a")) == (2, 0, 2)
    tree.release(lock)
    lock, _ = tree.lock(tree.find(SALT, key((1, 2, 3))))
    tree.release(first)
    tree.claim(lock, "b")
    end, _ = tree.extend(lock, key((4, 5)), [3, 4], "b")
    tree.claim(end, "b")
    assert (tree.known_blocks(end, "b"), tree.known_blocks(end, "a")) == (5, 3)
    check_tree(tree, [end])


def test_a_run_that_counts_as_used_later_stays_so_when_another_lock_ends() -> None:
    tree = PrefixTree(1)
    for token, bonus in ((1, 10), (2, 0)):
        node, _ = tree.lock(tree.find(SALT, b""))
        node, _ = tree.extend(node, key([token]), [token])
        tree.release(node, bonus)
    lock, _ = tree.lock(tree.find(SALT, key([1])))
    tree.release(lock)  # as after a store
    lock, _ = tree.lock(tree.find(SALT, key([2])))
    tree.release(lock)
    assert tree.evict(1) == [2]
