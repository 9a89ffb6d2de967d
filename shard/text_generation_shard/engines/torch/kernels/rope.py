"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and the write to the KV cache, in one pass over the fused
projection: rotated queries go to attention, rotated keys and values to the cache.

A program handles some heads of one token: few if there are few tokens, so that many programs share the work, else more.
"""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.kernels.append import to_cache
from text_generation_shard.engines.torch.kernels.operands import RopeStep
from text_generation_shard.engines.torch.kernels.pdl import pdl, wait_for_previous

_MANY_TOKENS = 128
"""From this number of tokens on there are enough programs, even with many heads per program."""
_ELEMENTS_PER_THREAD = 8
"""Elements of each half of a head: 16 bytes."""


def rotate_and_append(
    qkv: Tensor,
    queries: Tensor,
    step: RopeStep,
    cache_layer: Tensor,
    head_norms: tuple[Tensor, Tensor] | None,
    scales: Tensor | None = None,
) -> None:
    """Write rotated queries, x·cos + rotate_half(x)·sin, to `queries`; rotated keys and unchanged values to the cache.

    `qkv` [tokens, (num_heads + 2·num_kv_heads)·head_dim]: query heads, key heads, value heads; without value heads, values
    are the keys before their norm and rotation. `queries` [tokens, num_heads, head_dim], heads contiguous, may be the query heads
    of `qkv` itself. `cache_layer` [blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim], contiguous. Each of these in any float dtype.
    `head_norms`: optional weights [head_dim] of the RMS norms of each query head
    and each key head before the rotation. Norm and rotation are computed in float32 and rounded once. If tokens share a slot and
    a position, the keys and values of any one of them remain. `scales` float32 [2, num_kv_heads] divide the keys and values that
    are stored.
    """
    tokens = len(qkv)
    group, half_block, num_groups, num_warps = _tile(
        step.num_heads + 2 * step.num_kv_heads, step.head_dim, tokens >= _MANY_TOKENS
    )
    query_weight, key_weight = (None, None) if head_norms is None else head_norms
    _rotate_and_append_kernel[(tokens, num_groups)](
        qkv,
        queries,
        cache_layer,
        step.positions,
        step.rotary_positions,
        step.slots,
        step.block_tables,
        step.table,
        query_weight,
        key_weight,
        scales,
        qkv.stride(0),
        queries.stride(0),
        step.block_tables.stride(0),
        step.eps,
        step.query_beta,
        step.query_period,
        HAS_QUERY_SCALE=step.query_beta != 0.0,
        NORMS_VALUES=step.norms_values,
        VALUES_ARE_KEYS=qkv.shape[1] == (step.num_heads + step.num_kv_heads) * step.head_dim,
        NUM_HEADS=step.num_heads,
        NUM_KV_HEADS=step.num_kv_heads,
        HALF=step.head_dim // 2,
        BLOCK_SIZE=BLOCK_SIZE,
        GROUP=group,
        HALF_BLOCK=half_block,
        num_warps=num_warps,
        **pdl(qkv),
    )


@cache
def _tile(num_pieces: int, head_dim: int, many_tokens: bool) -> tuple[int, int, int, int]:  # noqa: FBT001 – a cache key
    """Return heads per program, half of head_dim as a power of two, programs per token, and warps per program."""
    half_block = triton.next_power_of_2(head_dim // 2)
    warp = 32 * _ELEMENTS_PER_THREAD
    group = max((4 if many_tokens else 1) * warp // half_block, 1)
    group = min(group, triton.next_power_of_2(num_pieces))
    return group, half_block, triton.cdiv(num_pieces, group), max(group * half_block // warp, 1)


# Read one number at a time, at any offset of a buffer: the same compiled kernel serves aligned and unaligned pointers.
@triton.jit(do_not_specialize_on_alignment=["positions", "rotary_positions", "slots", "block_tables"])
def _rotate_and_append_kernel(  # noqa: PLR0913, PLR0915 – a kernel's arguments are flat
    qkv: tl.tensor,
    queries: tl.tensor,
    cache_layer: tl.tensor,
    positions: tl.tensor,
    rotary_positions: tl.tensor | None,
    slots: tl.tensor,
    block_tables: tl.tensor,
    table: tl.tensor,
    query_weight: tl.tensor | None,
    key_weight: tl.tensor | None,
    scales: tl.tensor | None,
    qkv_stride: int,
    queries_stride: int,
    block_tables_stride: int,
    eps: float,
    query_beta: float,
    query_period: int,
    HAS_QUERY_SCALE: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    wait_for_previous(USE_PDL)
    token = tl.program_id(0)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    block = tl.load(block_tables + slot * block_tables_stride + position // BLOCK_SIZE)

    heads = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    inside = columns < HALF
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    is_real = heads < NUM_HEADS + 2 * NUM_KV_HEADS

    elements = heads * (2 * HALF) + columns
    sources = qkv + token * qkv_stride + elements
    if VALUES_ARE_KEYS:
        sources -= tl.where(is_value, NUM_KV_HEADS * 2 * HALF, 0)
    first = tl.load(sources, mask=is_real & inside, other=0.0).to(tl.float32)
    second = tl.load(sources + HALF, mask=is_real & inside, other=0.0).to(tl.float32)
    row = position
    if rotary_positions is not None:
        row = tl.load(rotary_positions + token)
    factors = table + row * (2 * HALF) + columns
    cos = tl.load(factors, mask=inside, other=0.0)
    sin = tl.load(factors + HALF, mask=inside, other=0.0)

    normed_first, normed_second = first, second
    if query_weight is not None:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)
        weights = tl.where(is_query, query_weight, key_weight) + columns
        normed_first *= scale * tl.load(weights, mask=inside, other=0.0).to(tl.float32)
        normed_second *= scale * tl.load(weights + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORMS_VALUES:
            first = tl.where(is_value, first * scale, first)
            second = tl.where(is_value, second * scale, second)
    first = tl.where(is_value, first, normed_first * cos - normed_second * sin)
    second = tl.where(is_value, second, normed_second * cos + normed_first * sin)

    if HAS_QUERY_SCALE:
        query_scale = 1.0 + query_beta * tl.log(1.0 + (position // query_period).to(tl.float32))
        first = tl.where(is_query, first * query_scale, first)
        second = tl.where(is_query, second * query_scale, second)
    rotated = queries + token * queries_stride + elements
    tl.store(rotated, first.to(queries.dtype.element_ty), mask=is_query & inside)
    tl.store(rotated + HALF, second.to(queries.dtype.element_ty), mask=is_query & inside)
    # The keys and values of all heads are contiguous in a block, as in qkv. A cache may have more than 2³¹ elements.
    pieces = block.to(tl.int64) * (2 * NUM_KV_HEADS) + (heads - NUM_HEADS)
    targets = cache_layer + (pieces * BLOCK_SIZE + position % BLOCK_SIZE) * (2 * HALF) + columns
    is_cached = is_real & ~is_query
    if scales is not None:
        head_scales = tl.load(scales + heads - NUM_HEADS, mask=is_cached, other=1.0)
        first /= head_scales
        second /= head_scales
    tl.store(targets, to_cache(first, cache_layer), mask=is_cached & inside)
    tl.store(targets + HALF, to_cache(second, cache_layer), mask=is_cached & inside)
