"""Attention data parallel ranks: each has a batch and a KV cache of its own, and reuses only what it has computed itself.

1.2.1: executor_request_queue.py; main: request_utils.py and adp_router.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trtllm_standin import sequences
from trtllm_standin.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from trtllm_standin.engine import Limits


class Rank:
    """One rank."""

    def __init__(self, limits: Limits) -> None:
        self.active: list[sequences.Sequence] = []
        self.used_blocks = dict.fromkeys(limits.windows, 0)
        self.prefixes = PrefixCache(limits.block_size)

    @property
    def load(self) -> tuple[int, int]:
        """Prompt tokens and number of its sequences."""
        return sum(len(each.prompt) for each in self.active), len(self.active)


def take(waiting: deque[sequences.Sequence], ranks: Sequence[Rank], most: int) -> list[sequences.Sequence]:
    """Take those that may start from the queue, `most` a rank. One that is bound to a full rank stays, and others pass it."""
    counts = [len(rank.active) for rank in ranks]
    room = most * len(ranks) - sum(counts)
    taken: list[sequences.Sequence] = []
    passed: list[sequences.Sequence] = []
    while waiting and len(taken) < room:
        sequence = waiting.popleft()
        target = sequence.scheduling.attention_dp_rank if sequence.scheduling is not None else None
        if len(ranks) > 1 and target is not None and not sequence.scheduling.attention_dp_relax:
            if counts[target] >= most:
                passed.append(sequence)
                continue
            counts[target] += 1
        taken.append(sequence)
    waiting.extendleft(reversed(passed))
    return taken


def start(taken: Iterable[sequences.Sequence], ranks: Sequence[Rank], most: int) -> None:
    """Give each to a rank: bound ones first, the others to the rank with the least load. Raises TypeError.

    An unset attention_dp_relax cannot be compared with others. Its default is None in 1.2, True since PR #14276 of May 2026.
    """

    def relaxed(sequence: sequences.Sequence) -> bool:
        return sequence.scheduling is None or sequence.scheduling.attention_dp_relax

    for sequence in sorted(taken, key=relaxed) if len(ranks) > 1 else taken:
        given = sequence.scheduling
        free = [rank for rank in ranks if len(rank.active) < most]
        chosen = min(free, key=lambda rank: rank.load)
        if len(ranks) > 1 and given is not None and given.attention_dp_rank is not None:
            wanted = ranks[given.attention_dp_rank]
            chosen = wanted if wanted in free else chosen
        sequence.rank = chosen
        chosen.active.append(sequence)
