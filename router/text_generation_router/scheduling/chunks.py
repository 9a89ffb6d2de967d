"""Which prompts get how much of a step's budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from text_generation_router.scheduling.entry import Entry


def share_budget(prompts: Sequence[Entry], budget: int) -> Iterator[tuple[Entry, int]]:
    """(entry, chunk) for those of `prompts`, oldest first, that get some of `budget` prompt tokens.

    The shortest rest goes first, so that a question does not wait for a book; but the oldest has half the budget for
    itself, so that the book gets read as well, however many questions come.
    """
    oldest = prompts[0]
    kept = min(oldest.unordered, -(-budget // 2))
    for entry in sorted(prompts, key=lambda entry: entry.unordered):  # stable: among equals the oldest goes first
        if entry is oldest:
            kept = 0
        chunk = min(entry.unordered, budget - kept)
        if chunk > 0:
            budget -= chunk
            yield entry, chunk
