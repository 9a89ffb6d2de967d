"""Memory and time of the prefix tree: it keeps nothing it does not need, and time does not grow with its size."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable

from tree_keys import SALT, cache, find, key

from text_generation_router.scheduling.prefix_tree import PrefixTree


def grown_by(action: Callable[[], object]) -> int:
    """Return the bytes that stay allocated after `action`."""
    gc.collect()
    tracemalloc.start()
    try:
        action()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_salts_without_blocks_are_forgotten() -> None:
    tree = PrefixTree(1)

    def many_salts() -> None:
        for number in range(1000):
            find(tree, [1], salt=f"salt {number}")
            cache(tree, [1], [1], salt=f"salt {number}")
            assert tree.evict(1) == [1]
            node, _ = tree.lock(tree.find(f"salt {number}", b""))
            node, _ = tree.extend(node, key([1]), [1])
            tree.release(node)
            root, _ = tree.lock(tree.find(f"salt {number}", b""))
            assert tree.evict(1) == [1]
            tree.release(root)

    assert grown_by(many_salts) < 33_000


def test_a_deep_path_is_walked_without_recursion() -> None:
    depth = 1500  # more than recursion could
    tree = PrefixTree(1)
    whole = key(range(depth))
    cache(tree, range(depth), range(depth))
    node, _ = tree.lock(tree.find(SALT, b""))
    for token in range(depth):
        other, _ = tree.lock(tree.find(SALT, whole[: 4 * (token + 1)]))
        tree.release(node)
        node = other
    assert tree.evictable_blocks == 0
    tree.release(node)
    assert tree.peek(SALT, whole) == depth
    assert tree.evict(depth) == list(range(depth - 1, -1, -1))


def best_seconds(repeats: int, calls: int, action: Callable[[], object]) -> float:
    """Return the processor time of one call, the best of several rounds."""
    rounds = []
    for _ in range(repeats):
        started = time.thread_time()
        for _ in range(calls):
            action()
        rounds.append((time.thread_time() - started) / calls)
    return min(rounds)


def test_a_long_run_is_compared_by_memcmp() -> None:
    tree = PrefixTree(16)
    cache(tree, range(200_000), range(12_500))
    whole = key(range(200_000))
    almost = key([*range(199_000), *([1] * 1000)])
    # About 0.03 ms each; a Python loop over the blocks takes some ms.
    assert best_seconds(10, 10, lambda: tree.peek(SALT, whole)) < 500e-6
    assert best_seconds(10, 10, lambda: tree.peek(SALT, almost)) < 500e-6


def test_the_cost_of_an_eviction_does_not_grow_with_the_tree() -> None:
    tree = PrefixTree(1)
    for token in range(30_000):
        cache(tree, [token, token + 1], [2 * token, 2 * token + 1])
    # About 0.001 ms; a pass over the leaves takes some ms.
    assert best_seconds(10, 20, lambda: tree.evict(1)) < 200e-6
