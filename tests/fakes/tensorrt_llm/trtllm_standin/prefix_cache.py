"""The reuse of computed blocks, and the events that tell of it (kvCacheManager.cpp, kvCacheEventManager.cpp)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

Key = tuple[Any, ...]
MAX_BLOCKS = 64
"""Blocks that stay; the oldest leaves first."""


@dataclass
class KvCacheRetentionConfig:
    """A class of the bindings (tests/unittest/llmapi/test_llm.py, examples/llm-api). It has no effect here."""

    @dataclass
    class TokenRangeRetentionConfig:
        """Durations are a timedelta or None."""

        token_start: int
        token_end: int | None = None
        priority: int = 35
        duration_ms: timedelta | None = None

    token_range_retention_configs: list[TokenRangeRetentionConfig]
    decode_retention_priority: int = 35
    decode_duration_ms: timedelta | None = None


class PrefixCache:
    """The whole blocks that were computed, by salt and adapter. Used by the engine's thread."""

    def __init__(self, block_size: int, event_buffer: int) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=event_buffer)
        """The unread events; of too many the oldest are lost."""
        self._block_size = block_size
        self._hashes: dict[Key, int] = {}
        self._ids = count()
        self._next_hash = count(1_000_003, 7)
        self._add({"type": "created", "num_blocks_per_cache_level": [MAX_BLOCKS, 0]})

    def match(self, root: Key, prompt: list[int]) -> int:
        """Return the leading tokens of `prompt` that are computed. One token at least is left to compute."""
        size = self._block_size
        found = 0
        while found + size < len(prompt) and (*root, *prompt[: found + size]) in self._hashes:
            found += size
        return found

    def store(self, root: Key, tokens: list[int]) -> None:
        """Keep the whole blocks of `tokens`."""
        size = self._block_size
        parent: int | None = None
        blocks: list[dict[str, Any]] = []
        first_parent: int | None = None
        for end in range(size, len(tokens) + 1, size):
            key = (*root, *tokens[:end])
            if key not in self._hashes:
                self._hashes[key] = next(self._next_hash)
                if not blocks:
                    first_parent = parent
                blocks.append(_stored(self._hashes[key], tokens[end - size : end]))
            parent = self._hashes[key]
        if blocks:
            self._add({"type": "stored", "parent_hash": first_parent, "blocks": blocks})
        removed = []
        while len(self._hashes) > MAX_BLOCKS:
            removed.append(self._hashes.pop(next(iter(self._hashes))))
        if removed:
            self._add({"type": "removed", "block_hashes": removed})

    def _add(self, data: dict[str, Any]) -> None:
        self.events.append({"event_id": next(self._ids), "data": data, "window_size": 2048})


def _stored(block_hash: int, tokens: list[int]) -> dict[str, Any]:
    """Return a stored block as `_utils.py`, KVCacheEventSerializer, writes it. The adapter is not told."""
    ids = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {"type": "stored_block", "block_hash": block_hash, "tokens": ids, "cache_level": 0, "priority": 35}
