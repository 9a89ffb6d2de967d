"""The size of the KV cache, and the worst-case step that measures the memory left for it.

Memory is divided between the groups of the cache so that none lies idle: a window group has a share of the blocks of the first,

    share = max(MIN_SHARE, (window + SPARE_TOKENS) / usual length), at most 1,

the part of its blocks that a sequence of the usual length holds there, and no fewer than a sequence needs to compute a whole chunk.
Long sequences want a small share, many short ones a large one: they hold as many blocks in each group. The usual length is at most
USUAL_TOKENS. A limit of the sequences in a step says more: they are to fill both groups together, if each has two windows or more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import Sampling, Stopping, WarmUpLimits
from text_generation_shard.engine import EngineInfo, InsufficientMemory, NewSequence, Orders
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE

HARDEST_SAMPLING = Sampling(greedy=False, top_p=1 - 1e-9)
"""Keeps nearly all tokens, so that the whole vocabulary must be sorted."""


MIN_SHARE = 0.1
USUAL_TOKENS = 16384
SPARE_TOKENS = 64
"""Tokens of blocks for growth, and of the first and the last block, which are not full."""


def worst_step(info: EngineInfo, limits: WarmUpLimits, hardest_rows: int, groups: int) -> tuple[Orders, int]:
    """Return a step as large as the limits allow, and its blocks of each group: long prompts, then one token in each
    remaining slot.

    The first `hardest_rows` sort the whole vocabulary; more need no more memory.
    """
    slots = min(limits.max_batch_size or info.max_slots, info.max_slots)
    tokens = limits.max_batch_prefill_tokens or info.suggested_prefill_tokens
    longest = info.max_sequence_length - 1
    if limits.max_batch_total_tokens:
        tokens = min(tokens, limits.max_batch_total_tokens)
    lengths: list[int] = []
    while tokens > 0 and len(lengths) < slots:
        lengths.append(min(tokens, longest))
        tokens -= lengths[-1]
    lengths += [1] * (slots - len(lengths))
    admissions: list[NewSequence] = []
    num_blocks = 0
    for slot, length in enumerate(lengths):
        count = blocks_for(length)
        blocks = tuple(range(num_blocks, num_blocks + count))
        admissions.append(
            NewSequence(
                slot=slot,
                prompt=(0,) * length,
                stopping=Stopping(max_new_tokens=1),
                sampling=HARDEST_SAMPLING if slot < hardest_rows else Sampling(),
                blocks=blocks,
                further_blocks=((0, blocks),) * (groups - 1),
                adapter=info.adapters[0] if info.adapters else "",
            )
        )
        num_blocks += count
    return Orders(number=0, placements=tuple(admissions), prefill=tuple(enumerate(lengths))), num_blocks


def cache_groups(
    info: EngineInfo,
    limits: WarmUpLimits,
    windows: Sequence[int | None],
    block_bytes: Sequence[int],
    available: int,
) -> tuple[CacheGroup, ...]:
    """Return the groups for `available` bytes: of the size asked for, else of the largest that can ever be used.

    `windows` and `block_bytes` are those of the groups. Raises InsufficientMemory with the numbers.
    """
    chunk = blocks_for(limits.max_batch_prefill_tokens or info.suggested_prefill_tokens)

    def group(window: int | None, first: int) -> CacheGroup:
        if window is None:
            return CacheGroup(first)
        usual: float = min(info.max_sequence_length, USUAL_TOKENS)
        if limits.max_batch_size:
            usual = min(usual, max(first * BLOCK_SIZE / limits.max_batch_size, 2 * window))
        share = max(MIN_SHARE, (window + SPARE_TOKENS) / usual)
        least = CacheGroup(0, window).blocks_held(info.max_sequence_length, BLOCK_SIZE) + chunk
        return CacheGroup(min(first, max(int(share * first), least)), window)

    def needed(first: int) -> int:
        groups = (group(window, first) for window in windows)
        return sum(each.num_blocks * nbytes for each, nbytes in zip(groups, block_bytes, strict=True))

    usable = info.max_slots * blocks_for(info.max_sequence_length)
    wanted = limits.max_batch_total_tokens // BLOCK_SIZE
    fitting = bisect_right(range(max(usable, wanted, 1) + 1), available, key=needed) - 1
    if (least := max(1, wanted)) > fitting:
        raise InsufficientMemory(
            f"{least * BLOCK_SIZE} tokens of KV cache take {needed(least) / 2**30:.2f} GiB, {max(available, 0) / 2**30:.2f} GiB are "
            f"left beside the model and its largest step: room for {max(fitting, 0) * BLOCK_SIZE} tokens"
        )
    return tuple(group(window, wanted or min(fitting, usable)) for window in windows)


def blocks_for(tokens: int) -> int:
    """Return the number of blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)
