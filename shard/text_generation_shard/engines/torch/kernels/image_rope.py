"""Rotary position embeddings in the attention layers of image encoders, whose factors are given for each token."""

import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8
"""Heads of the queries that a program rotates, and as many of the keys."""


def rotate(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return x·cos + rotate_half(x)·sin of queries and keys [tokens, heads, head_dim], computed in float32 and rounded once.

    `cos` and `sin` [tokens, head_dim], contiguous. Heads are contiguous, and the strides of queries and keys are equal.
    """
    rotated = queries.new_empty(2, *queries.shape)
    tokens, heads, head_dim = queries.shape
    _rotate_kernel[(tokens, triton.cdiv(heads, _HEADS))](
        queries,
        keys,
        cos,
        sin,
        rotated,
        rotated[1],
        *queries.stride()[:2],
        NUM_HEADS=heads,
        HALF=head_dim // 2,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        HEADS=_HEADS,
        num_warps=4,
    )
    return rotated[0], rotated[1]


@triton.jit
def _rotate_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    queries: tl.tensor,
    keys: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rotated_queries: tl.tensor,
    rotated_keys: tl.tensor,
    token_stride: int,
    head_stride: int,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (heads < NUM_HEADS) & (columns < HALF)

    factors = token * (2 * HALF) + columns
    cos_first = tl.load(cos + factors, mask=columns < HALF, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + factors + HALF, mask=columns < HALF, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + factors, mask=columns < HALF, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + factors + HALF, mask=columns < HALF, other=0.0).to(tl.float32)

    sources = token * token_stride + heads * head_stride + columns
    targets = (token * NUM_HEADS + heads) * (2 * HALF) + columns
    for is_key in tl.static_range(2):
        x = keys if is_key else queries
        out = rotated_keys if is_key else rotated_queries
        first = tl.load(x + sources, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + sources + HALF, mask=inside, other=0.0).to(tl.float32)
        rotated_first = first * cos_first - second * sin_first
        rotated_second = second * cos_second + first * sin_second
        tl.store(out + targets, rotated_first.to(out.dtype.element_ty), mask=inside)
        tl.store(out + targets + HALF, rotated_second.to(out.dtype.element_ty), mask=inside)
