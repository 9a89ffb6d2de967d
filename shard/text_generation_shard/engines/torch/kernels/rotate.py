"""Rotation of queries and keys by given factors, in one launch, and the write of keys and values to the cache, in another.

For models whose own code computes the factors of the rotation: see rope.py for ours.
"""

# ruff: noqa: N803 – kernel constants are in capitals, as usual in Triton
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE

_ELEMENTS_PER_PROGRAM = 1024


def rotate(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return x·cos + rotate_half(x)·sin for both, computed in float32 and rounded once.

    `queries` and `keys` [heads, tokens, head_dim] with any strides of heads and tokens; `cos` and `sin` [tokens, head_dim],
    contiguous. The results have contiguous heads of each token.
    """
    (num_heads, tokens, head_dim), num_kv_heads = queries.shape, keys.shape[0]
    rotated = torch.empty(tokens, num_heads + num_kv_heads, head_dim, dtype=queries.dtype, device=queries.device)
    half = head_dim // 2
    half_block = triton.next_power_of_2(half)
    group = max(_ELEMENTS_PER_PROGRAM // (2 * half_block), 1)
    _rotate_kernel[(tokens, triton.cdiv(num_heads + num_kv_heads, group))](
        queries,
        keys,
        cos,
        sin,
        rotated,
        queries.stride(0),
        queries.stride(1),
        keys.stride(0),
        keys.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        GROUP=group,
        HALF_BLOCK=half_block,
        num_warps=4,
    )
    heads = rotated.transpose(0, 1)
    return heads[:num_heads], heads[num_heads:]


@triton.jit
def _rotate_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    queries: tl.tensor,
    keys: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rotated: tl.tensor,
    query_head_stride: int,
    query_token_stride: int,
    key_head_stride: int,
    key_token_stride: int,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    inside = columns < HALF
    is_query = (heads < NUM_HEADS) & inside
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS) & inside
    query = queries + token * query_token_stride + heads * query_head_stride + columns
    key = keys + token * key_token_stride + (heads - NUM_HEADS) * key_head_stride + columns
    # Each head is one of the two; the other load gives zeros.
    first = tl.load(query, mask=is_query, other=0.0).to(tl.float32) + tl.load(key, mask=is_key, other=0.0).to(
        tl.float32
    )
    second = tl.load(query + HALF, mask=is_query, other=0.0).to(tl.float32) + tl.load(
        key + HALF, mask=is_key, other=0.0
    ).to(tl.float32)
    factors = token * (2 * HALF) + columns
    first_cos = tl.load(cos + factors, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + factors, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + factors + HALF, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + factors + HALF, mask=inside, other=0.0).to(tl.float32)
    targets = rotated + (token * (NUM_HEADS + NUM_KV_HEADS) + heads) * (2 * HALF) + columns
    is_head = is_query | is_key
    dtype = rotated.dtype.element_ty
    tl.store(targets, (first * first_cos - second * first_sin).to(dtype), mask=is_head)
    tl.store(targets + HALF, (second * second_cos + first * second_sin).to(dtype), mask=is_head)


def append(
    keys: Tensor, values: Tensor, cache_layer: Tensor, positions: Tensor, slots: Tensor, block_tables: Tensor
) -> None:
    """Write `keys` and `values` [heads, tokens, dim] with any strides of heads and tokens to the cache of a layer.

    `cache_layer` [blocks, 2, heads, BLOCK_SIZE, head_dim], contiguous; zeros fill each head up to its head_dim. `positions` and
    `slots` int32 [tokens], `block_tables` int32 [slots, blocks].
    """
    heads, tokens, key_dim = keys.shape
    head_dim = cache_layer.shape[4]
    width = triton.next_power_of_2(head_dim)
    group = max(_ELEMENTS_PER_PROGRAM // width, 1)
    _append_kernel[(tokens, triton.cdiv(heads, group))](
        keys,
        values,
        cache_layer,
        positions,
        slots,
        block_tables,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        block_tables.stride(0),
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=values.shape[2],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=BLOCK_SIZE,
        GROUP=group,
        WIDTH=width,
        num_warps=4,
    )


# Read one number at a time, at any offset of a buffer: the same compiled kernel serves aligned and unaligned pointers.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots", "block_tables"])
def _append_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    keys: tl.tensor,
    values: tl.tensor,
    cache_layer: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    block_tables: tl.tensor,
    key_head_stride: int,
    key_token_stride: int,
    value_head_stride: int,
    value_token_stride: int,
    table_stride: int,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    position = tl.load(positions + token)
    block = tl.load(block_tables + tl.load(slots + token) * table_stride + position // BLOCK_SIZE).to(tl.int64)
    heads = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    is_head = heads < HEADS
    place = token.to(tl.int64)
    key = tl.load(
        keys + place * key_token_stride + heads * key_head_stride + columns,
        mask=is_head & (columns < KEY_DIM),
        other=0.0,
    )
    value = tl.load(
        values + place * value_token_stride + heads * value_head_stride + columns,
        mask=is_head & (columns < VALUE_DIM),
        other=0.0,
    )
    targets = cache_layer + ((block * (2 * HEADS) + heads) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM + columns
    stored = is_head & (columns < HEAD_DIM)
    tl.store(targets, key.to(cache_layer.dtype.element_ty), mask=stored)
    tl.store(targets + HEADS * BLOCK_SIZE * HEAD_DIM, value.to(cache_layer.dtype.element_ty), mask=stored)
