"""The merge of partial results of attention, and the weights of sinks.

A row whose keys are split over programs has a mean of the values and the log 2 of the sum of weights from each (Flash-Decoding, Dao
et al. 2023).
"""

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)


@triton.jit
def merge(  # noqa: PLR0913 – called from kernels only, whose arguments are flat
    partials: tl.tensor,
    logs: tl.tensor,
    sinks: tl.tensor | None,
    out: tl.tensor,
    row: tl.tensor,
    first_line: tl.tensor,
    parts: tl.tensor,
    first_head: tl.tensor,
    out_stride: int,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGED: tl.constexpr,
) -> None:
    """Write the mean of the parts' means for `GROUP` heads of a row, weighted with the sums, whose log 2 is in `logs`.

    The parts are the lines from `first_line` on.
    """
    rows: tl.constexpr = triton.next_power_of_2(GROUP)
    chunk: tl.constexpr = MERGED // (rows * WIDTH) if rows * WIDTH < MERGED else 1
    group = tl.arange(0, rows)
    # Positions beyond the group repeat its last head.
    heads = first_head + tl.minimum(group, GROUP - 1)
    dims = tl.arange(0, WIDTH)
    is_dim = dims < HEAD_DIM
    maximum = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mean = tl.zeros([rows, WIDTH], tl.float32)
    for first in range(0, parts, chunk):
        part = first + tl.arange(0, chunk)
        is_part = part < parts
        lines = (first_line + part)[:, None] * HEADS + heads[None, :]
        # Other programs may have just written these: bypass this multiprocessor's L1 cache.
        log = tl.load(logs + lines, mask=is_part[:, None], other=float("-inf"), cache_modifier=".cg")
        partial = tl.load(
            partials + lines[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=is_part[:, None, None] & is_dim[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_maximum = tl.maximum(maximum, tl.max(log, axis=0))
        weights = tl.exp2(log - new_maximum[None, :])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weights, axis=0)
        mean = mean * decay[:, None] + tl.sum(weights[:, :, None] * partial, axis=0)
        maximum = new_maximum
    if sinks is not None:
        total += group_sink_weights(sinks, heads, GROUP, maximum)
    mean = mean / total[:, None]
    targets = out + row * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(targets, mean.to(out.dtype.element_ty), mask=(group < GROUP)[:, None] & is_dim[None, :])


@triton.jit
def group_sink_weights(sinks: tl.tensor, heads: tl.tensor, GROUP: tl.constexpr, maximum: tl.tensor) -> tl.tensor:
    """Return `sink_weights` of the heads of a group; rows beyond the group get any."""
    first = tl.min(heads, axis=0)
    return sink_weights(sinks, tl.minimum(heads, first + GROUP - 1), maximum)


@triton.jit
def sink_weights(sinks: tl.tensor, heads: tl.tensor, maximum: tl.tensor) -> tl.tensor:
    """Return the weights of the sinks of `heads` relative to `maximum`, which is in units of log 2."""
    return tl.exp2(tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634 - maximum)
