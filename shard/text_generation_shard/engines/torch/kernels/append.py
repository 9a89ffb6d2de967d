"""The write of keys and values to the cache, for models whose own code rotates them: see rope.py for ours."""

import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.kernels.pdl import pdl, wait_for_previous

_ELEMENTS_PER_PROGRAM = 1024
E4M3FN_MAX = tl.constexpr(448.0)
E5M2_MAX = tl.constexpr(57344.0)


@triton.jit
def to_cache(values: tl.tensor, cache_layer: tl.tensor) -> tl.tensor:
    """Return float32 `values` in the data type of `cache_layer`; FP8 saturates, and NaN stays NaN."""
    if cache_layer.dtype.element_ty.primitive_bitwidth == 8:
        largest: tl.constexpr = E4M3FN_MAX if cache_layer.dtype.element_ty == tl.float8e4nv else E5M2_MAX
        values = tl.clamp(values, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    return values.to(cache_layer.dtype.element_ty)


def append(
    keys: Tensor,
    values: Tensor,
    cache_layer: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Write `keys` and `values` [heads, tokens, dim] with any strides of heads and tokens to the cache of a layer.

    `cache_layer` [blocks, 2, heads, BLOCK_SIZE, head_dim], contiguous; zeros fill each head up to its head_dim. One of latent rows,
    [blocks, 1, 1, BLOCK_SIZE, head_dim], has no place for values. `positions` and `slots` int32 [tokens], `block_tables` int32
    [slots, blocks]. `scales` as in `rotate_and_append`.
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
        scales,
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
        PARTS=cache_layer.shape[1],
        num_warps=4,
        **pdl(keys),
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
    scales: tl.tensor | None,
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
    PARTS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    wait_for_previous(USE_PDL)
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
    ).to(tl.float32)
    value = tl.load(
        values + place * value_token_stride + heads * value_head_stride + columns,
        mask=is_head & (columns < VALUE_DIM),
        other=0.0,
    ).to(tl.float32)
    if scales is not None:
        key /= tl.load(scales + heads, mask=is_head, other=1.0)
        value /= tl.load(scales + HEADS + heads, mask=is_head, other=1.0)
    targets = (
        cache_layer + ((block * (PARTS * HEADS) + heads) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM + columns
    )
    stored = is_head & (columns < HEAD_DIM)
    tl.store(targets, to_cache(key, cache_layer), mask=stored)
    if PARTS == 2:
        tl.store(targets + HEADS * BLOCK_SIZE * HEAD_DIM, to_cache(value, cache_layer), mask=stored)
