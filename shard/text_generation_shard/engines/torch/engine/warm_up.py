"""The size of the KV cache, and the worst-case step that measures the memory left for it.

Memory is divided between the groups of the cache so that none lies idle: docs/gpu.md has the formula for window groups. A group of
states has STATES blocks for each USUAL_TOKENS (or the longest sequence, if that is shorter) of the first group: the state of each
sequence, and checkpoints. It has at least one for each sequence in a step, if there is a limit of these and half of the memory is
enough, at least two, and at most STATES for each slot. One block more is that of padding.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import Sampling, Stopping, WarmUpLimits
from text_generation_shard.engine import EngineInfo, InsufficientMemory, NewSequence, Orders
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.engine.host_cache import CHECK_BYTES

HARDEST_SAMPLING = Sampling(greedy=False, top_p=1 - 1e-9)
"""Keeps nearly all tokens, so that the whole vocabulary must be sorted."""


MIN_SHARE = 0.1
USUAL_TOKENS = 16384
SPARE_TOKENS = 64
"""Tokens of blocks for growth, and of the first and the last block, which are not full."""


STATES = 4
DEEP_TOKENS = 4096
"""A few tokens after so many have kernels of their own: see kernels/chunk_attention.py."""


def deep_step(info: EngineInfo, kinds: Sequence[CacheGroup]) -> Orders:
    """Return a step with the last token of a long prompt, whose blocks are all the first one."""
    computed = min(DEEP_TOKENS, info.max_sequence_length - 2) // BLOCK_SIZE * BLOCK_SIZE
    blocks = (0,) * blocks_for(computed + 1)
    states = (0, 0) if computed else (0,)
    new = NewSequence(
        slot=0,
        prompt=(0,) * (computed + 1),
        stopping=Stopping(max_new_tokens=1),
        blocks=blocks,
        computed_tokens=computed,
        further_blocks=tuple((0, states if kind.is_state else blocks) for kind in kinds[1:]),
    )
    return Orders(number=0, placements=(new,), prefill=((0, 1),))


def worst_step(
    info: EngineInfo, limits: WarmUpLimits, hardest_rows: int, kinds: Sequence[CacheGroup]
) -> tuple[Orders, tuple[CacheGroup, ...]]:
    """Return a step as large as the limits allow, and its groups: long prompts, then one token in each remaining slot.

    The first `hardest_rows` sort the whole vocabulary; more need no more memory. All sequences have the same state.
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
                further_blocks=tuple((0, (0,) if kind.is_state else blocks) for kind in kinds[1:]),
            )
        )
        num_blocks += count
    groups = tuple(replace(kind, num_blocks=1 if kind.is_state else num_blocks) for kind in kinds)
    return Orders(number=0, placements=tuple(admissions), prefill=tuple(enumerate(lengths))), groups


def cache_bytes(groups: Sequence[CacheGroup], block_bytes: Sequence[int]) -> int:
    """Return the memory of groups, with the state of padding."""
    return sum((each.num_blocks + each.is_state) * nbytes for each, nbytes in zip(groups, block_bytes, strict=True))


def cache_groups(
    info: EngineInfo,
    limits: WarmUpLimits,
    kinds: Sequence[CacheGroup],
    block_bytes: Sequence[int],
    available: int,
) -> tuple[CacheGroup, ...]:
    """Return the groups for `available` bytes: of the size asked for, else of the largest that can ever be used.

    `kinds` are the groups without blocks, `block_bytes` the bytes of their blocks. Raises InsufficientMemory with the numbers.
    """
    chunk = blocks_for(limits.max_batch_prefill_tokens or info.suggested_prefill_tokens)

    usual = min(info.max_sequence_length, USUAL_TOKENS)
    running = min(limits.max_batch_size, max(available, 0) // 2 // max(block_bytes[-1], 1))

    def group(kind: CacheGroup, first: int) -> CacheGroup:
        if kind.is_state:
            states = min(STATES * first * BLOCK_SIZE // usual, STATES * info.max_slots)
            return replace(kind, num_blocks=max(2, running, states))
        if kind.window is None:
            return replace(kind, num_blocks=first)
        length: float = usual
        if limits.max_batch_size:
            length = min(usual, max(first * BLOCK_SIZE / limits.max_batch_size, 2 * kind.window))
        share = max(MIN_SHARE, (kind.window + SPARE_TOKENS) / length)
        least = kind.blocks_held(info.max_sequence_length, BLOCK_SIZE) + chunk
        return replace(kind, num_blocks=min(first, max(int(share * first), least)))

    def needed(first: int) -> int:
        return cache_bytes([group(kind, first) for kind in kinds], block_bytes)

    usable = info.max_slots * blocks_for(info.max_sequence_length)
    wanted = limits.max_batch_total_tokens // BLOCK_SIZE
    fitting = bisect_right(range(max(usable, wanted, 1) + 1), available, key=needed) - 1
    if (least := max(1, wanted)) > fitting:
        raise InsufficientMemory(
            f"{least * BLOCK_SIZE} tokens of KV cache take {needed(least) / 2**30:.2f} GiB, {max(available, 0) / 2**30:.2f} GiB are "
            f"left beside the model and its largest step: room for {max(fitting, 0) * BLOCK_SIZE} tokens"
        )
    # The states do not shrink with a number of tokens that was asked for.
    largest = min(fitting, usable)
    return tuple(group(kind, largest if kind.is_state else wanted or largest) for kind in kinds)


def with_host_blocks(
    groups: tuple[CacheGroup, ...],
    info: EngineInfo,
    limits: WarmUpLimits,
    block_bytes: Sequence[int],
    available: int,
) -> tuple[CacheGroup, ...]:
    """Return groups with their blocks in `available` bytes of the host cache, by the rule for the device's memory.

    It holds prefixes of more sequences than run at once. All shards that share it find the same numbers. Raises InsufficientMemory.
    """
    sizes = [each + CHECK_BYTES for each in block_bytes]
    info, limits = replace(info, max_slots=available // sizes[0]), WarmUpLimits(limits.max_batch_prefill_tokens, 0, 0)
    try:
        on_host = cache_groups(info, limits, groups, sizes, available)
    except InsufficientMemory:
        raise InsufficientMemory(f"a host cache of {available / 2**30:.2f} GiB is too small for this model") from None
    return tuple(replace(group, host_blocks=host.num_blocks) for group, host in zip(groups, on_host, strict=True))


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
