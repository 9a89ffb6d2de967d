"""Helpers to fill and query a PrefixTree."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from text_generation_router.scheduling.prefix_tree import PrefixTree

SALT = "a tenant"


def key(tokens: Iterable[int]) -> bytes:
    return array("I", tokens).tobytes()


def cache(tree: PrefixTree, tokens: Sequence[int], blocks: Sequence[int], salt: str = SALT) -> list[int]:
    """Act as a request that computed `tokens` into `blocks`. Return the blocks that it keeps."""
    node, held = tree.lock(tree.find(salt, key(tokens)))
    cached = tree.peek(salt, key(tokens))
    node, present = tree.extend(node, key(tokens[cached:]), blocks[len(held) :])
    assert present == 0
    tree.release(node)
    return list(blocks[: len(held)])


def find(tree: PrefixTree, tokens: Sequence[int], salt: str = SALT) -> list[int]:
    """Return the blocks of the longest cached prefix. Counts as a use."""
    node, blocks = tree.lock(tree.find(salt, key(tokens)))
    tree.release(node)
    return blocks
