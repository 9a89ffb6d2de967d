"""The KV cache: blocks that are reserved, and blocks whose content may be used again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """`total` blocks of `block_size` tokens, reserved in numbers: which block is whose does not matter here."""

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        self.used = 0

    def needed(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def reserve(self, blocks: int) -> bool:
        """Take so many blocks, if there are so many."""
        if self.used + blocks > self.total:
            return False
        self.used += blocks
        return True

    def release(self, blocks: int) -> None:
        """Give blocks back."""
        self.used -= blocks


class PrefixCache:
    """Which whole blocks were computed: the most recent ones, as many as the pool holds.

    A block is known by all tokens up to its end and by its request's salt: the same text under another salt is another
    block (cache_salt, 1.2.1: llm.py). Content that could be reused does not count as used: it is given up when room is needed.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._known: OrderedDict[int, None] = OrderedDict()
        self.reused = 0
        self.missed = 0

    def match(self, prompt: Sequence[int], salt: str | None) -> int:
        """Tokens at the prompt's front that need not be computed: whole blocks, and never the last token."""
        matched = 0
        for key in self._keys(prompt[:-1], salt):
            if key not in self._known:
                self.missed += 1
                break
            self._known.move_to_end(key)
            self.reused += 1
            matched += self._block_size
        return matched

    def store(self, tokens: Sequence[int], salt: str | None) -> None:
        """Remember the whole blocks of a sequence."""
        for key in self._keys(tokens, salt):
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def _keys(self, tokens: Sequence[int], salt: str | None) -> list[int]:
        keys = []
        key = hash(salt)
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            key = hash((key, tuple(tokens[end - self._block_size : end])))
            keys.append(key)
        return keys
