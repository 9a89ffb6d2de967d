"""The size of the KV cache, and the worst-case step that measures the memory left for it."""

from __future__ import annotations

from text_generation_proto.values import Sampling, Stopping, WarmUpLimits
from text_generation_shard.engine import EngineInfo, InsufficientMemory, NewSequence, Orders
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE

HARDEST_SAMPLING = Sampling(greedy=False, top_p=1 - 1e-9)
"""Keeps nearly all tokens, so that the whole vocabulary must be sorted."""


def worst_step(info: EngineInfo, limits: WarmUpLimits, hardest_rows: int) -> tuple[Orders, int]:
    """Return a step as large as the limits allow, and its blocks: long prompts, then one token in each remaining slot.

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
        admissions.append(
            NewSequence(
                slot=slot,
                prompt=(0,) * length,
                stopping=Stopping(max_new_tokens=1),
                sampling=HARDEST_SAMPLING if slot < hardest_rows else Sampling(),
                blocks=tuple(range(num_blocks, num_blocks + count)),
            )
        )
        num_blocks += count
    return Orders(number=0, placements=tuple(admissions), prefill=tuple(enumerate(lengths))), num_blocks


def pool_blocks(info: EngineInfo, limits: WarmUpLimits, block_bytes: int, available: int) -> int:
    """Return the number of KV blocks for `available` bytes: as many as asked for, else as many as can ever be used.

    Raises InsufficientMemory with the numbers.
    """
    fitting = available // block_bytes
    wanted = max(1, limits.max_batch_total_tokens // BLOCK_SIZE)
    if wanted > fitting:
        raise InsufficientMemory(
            f"{wanted * BLOCK_SIZE} tokens of KV cache take {wanted * block_bytes / 2**30:.2f} GiB, {max(available, 0) / 2**30:.2f} GiB are "
            f"left beside the model and its largest step: room for {max(fitting, 0) * BLOCK_SIZE} tokens"
        )
    if limits.max_batch_total_tokens:
        return wanted
    return min(fitting, info.max_slots * blocks_for(info.max_sequence_length))


def blocks_for(tokens: int) -> int:
    """Return the number of blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)
