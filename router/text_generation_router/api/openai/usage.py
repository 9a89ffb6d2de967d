"""OpenAI's token counts."""

from __future__ import annotations

from typing import Any


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The counts of an answer, or of several: the prompt counts once for all its answers.

    `cached_tokens` of the `prompt_tokens` were found in the KV cache.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_json(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> bytes:
    """The same written down, for chunks."""
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
        % (prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached_tokens)
    )
