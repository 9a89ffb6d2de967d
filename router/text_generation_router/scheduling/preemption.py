"""Preemption: the choice of a running sequence that returns to the queue when a replica runs out of KV blocks, and how to avoid it."""

from collections.abc import Iterable

from text_generation_router.scheduling.sequence import ScheduledSequence

ANSWERS = 6


def growth_margin(others: int, answer: int, num_blocks: int) -> int:
    """Return the blocks that a placement leaves beside `others`: one that takes the last of `num_blocks` would soon be preempted.

    Until one of the others ends and gives its blocks back, they grow by one `answer` of expected length in all, on average and however
    many they are. There is room for several, as lengths vary.
    """
    return others and max(others, min(ANSWERS * answer, num_blocks // 8))


def choose_victim(running: Iterable[ScheduledSequence], *, self_scheduling: bool) -> ScheduledSequence | None:
    """Return the newest sequence of the lowest priority. The oldest is never chosen unless it is the only one.

    So the oldest always advances; a request that could not finish alone is not accepted.

    A self-scheduling engine makes room by itself, and can start a grammar only at the end of the prompt. So its sequences
    under a grammar are not chosen, as they could not go on: None if there are no others.
    """
    oldest, *others = sorted(running, key=lambda sequence: sequence.arrival)
    candidates = others or [oldest]
    if self_scheduling:
        candidates = [sequence for sequence in candidates if sequence.request.grammar is None]
    return max(candidates, key=lambda sequence: (sequence.request.qos.priority, sequence.arrival), default=None)
