"""The reuse of computed blocks (kvCacheManager.cpp)."""

from __future__ import annotations

from typing import Any

Key = tuple[Any, ...]
MAX_BLOCKS = 64
"""Blocks that stay; the oldest leaves first."""


class PrefixCache:
    """The whole blocks that were computed, by salt and adapter. Used by the engine's thread."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[Key, None] = {}
        """An ordered set."""

    def match(self, root: Key, prompt: list[int]) -> int:
        """Return the leading tokens of `prompt` that are computed. One token at least is left to compute."""
        size = self._block_size
        found = 0
        while found + size < len(prompt) and (*root, *prompt[: found + size]) in self._blocks:
            found += size
        return found

    def store(self, root: Key, tokens: list[int]) -> None:
        """Keep the whole blocks of `tokens`."""
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            self._blocks.setdefault((*root, *tokens[:end]))
        while len(self._blocks) > MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
