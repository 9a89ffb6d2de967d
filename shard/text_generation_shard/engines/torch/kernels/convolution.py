"""Short causal convolutions over the tokens of each sequence, from the inputs that a pool keeps of it: see `operands.Convolution`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.batch.state_rows import StateRows
from text_generation_shard.engines.torch.kernels.activation import activated
from text_generation_shard.engines.torch.kernels.operands import Convolution
from text_generation_shard.engines.torch.kernels.pdl import after_previous, pdl

_CHANNELS = 256
"""Channels of a program for decode rows."""
_TOKENS, _TILE_CHANNELS = 32, 64
"""Tokens and channels of a program for chunks."""


def convolve(x: Tensor, convolution: Convolution, states: Tensor, rows: StateRows) -> Tensor:
    """Return the convolved values [tokens, channels] of `x` [tokens, channels], computed in float32; updates the states.

    Rows of `x` may have any distance. The outputs of padding rows, which have the spare block, are zeros.
    """
    channels, taps = x.shape[1], len(convolution.weight)
    drafts = states.shape[1] - taps + 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    common = x, states, convolution.weight, convolution.bias, out
    if rows.decoding:
        _step_kernel[(rows.decoding, triton.cdiv(channels, _CHANNELS))](
            *common,
            rows.blocks,
            rows.behind,
            x.stride(0),
            channels,
            len(states) - 1,
            DRAFTS=drafts,
            TAPS=taps,
            ACTIVATES=convolution.activates,
            CHANNELS=_CHANNELS,
            **pdl(x),
        )
    if rows.chunks:
        grid = len(rows.chunks), triton.cdiv(rows.longest_chunk, _TOKENS), triton.cdiv(channels, _TILE_CHANNELS)
        _chunk_kernel[grid](
            *common,
            rows.reads,
            rows.writes,
            rows.checkpoints,
            rows.positions,
            rows.ends,
            rows.rests,
            rows.decoding,
            x.stride(0),
            channels,
            DRAFTS=drafts,
            TAPS=taps,
            ACTIVATES=convolution.activates,
            TOKENS=_TOKENS,
            CHANNELS=_TILE_CHANNELS,
        )
    return out


@triton.jit
def _finished(
    values: tl.tensor, bias: tl.tensor | None, places: tl.tensor, inside: tl.tensor, ACTIVATES: tl.constexpr
) -> tl.tensor:
    if bias is not None:
        values += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATES:
        values = activated(values, "silu")
    return values


@triton.jit
def row_length(blocks: tl.tensor, row: tl.tensor, count: tl.tensor, DRAFTS: tl.constexpr) -> tl.tensor:
    """Return the tokens of the decode row that begins with token `row` of `count`; 0 if the token is a draft."""
    block = tl.load(blocks + row)
    length = (tl.load(blocks + row - 1, mask=row > 0, other=-1) != block).to(tl.int32)
    for place in tl.static_range(1, DRAFTS + 1):
        same = tl.load(blocks + row + place, mask=row + place < count, other=-1) == block
        length += tl.where((length > 0) & same, 1, 0)
    return length


@triton.jit(do_not_specialize_on_alignment=["blocks", "behind"])
def _step_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    states: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    blocks: tl.tensor,
    behind: tl.tensor,
    x_stride: int,
    channels: int,
    spare_block: int,
    DRAFTS: tl.constexpr,
    TAPS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    CHANNELS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    after_previous(USE_PDL)
    row = tl.program_id(0)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    block = tl.load(blocks + row)
    if block == spare_block:
        tl.store(out + row * channels + columns, tl.zeros([CHANNELS], out.dtype.element_ty), mask=inside)
        return
    own = x + row * x_stride + columns
    history = states + block.to(tl.int64) * (TAPS - 1 + DRAFTS) * channels + columns
    if DRAFTS:
        length = row_length(blocks, row, tl.num_programs(0), DRAFTS)
        if length == 0:
            return
        before = history + tl.load(behind + row) * channels
    else:
        length, before = 1, history
    for place in range(length):
        total = tl.zeros([CHANNELS], tl.float32)
        for tap in tl.static_range(TAPS):
            source = place + (tap - TAPS + 1)
            factors = tl.load(weight + tap * channels + columns, mask=inside, other=0.0).to(tl.float32)
            total += _input(own, before, source, x_stride, channels, inside, TAPS).to(tl.float32) * factors
        total = _finished(total, bias, columns, inside, ACTIVATES)
        tl.store(out + (row + place) * channels + columns, total.to(out.dtype.element_ty), mask=inside)
    # Each is read from a later place than it is written to.
    for place in tl.static_range(TAPS - 1 + DRAFTS):
        kept = inside & (place < length + (TAPS - 2))
        value = _input(own, before, place - (TAPS - 2), x_stride, channels, kept, TAPS)
        tl.store(history + place * channels, value.to(states.dtype.element_ty), mask=kept)


@triton.jit
def _input(
    own: tl.tensor,
    before: tl.tensor,
    source: tl.tensor,
    x_stride: int,
    channels: int,
    inside: tl.tensor,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Return the input of the token at a distance `source` from the first one of its row."""
    value = tl.load(own + source * x_stride, mask=inside & (source >= 0), other=0.0).to(tl.float32)
    kept = before + (source + (TAPS - 1)) * channels
    return value + tl.load(kept, mask=inside & (source < 0), other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=["decoding"],
    do_not_specialize_on_alignment=["reads", "writes", "checkpoints", "positions", "ends", "rests"],
)
def _chunk_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    x: tl.tensor,
    states: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    checkpoints: tl.tensor,
    positions: tl.tensor,
    ends: tl.tensor,
    rests: tl.tensor,
    decoding: int,
    x_stride: int,
    channels: int,
    DRAFTS: tl.constexpr,
    TAPS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    start = tl.load(ends + tl.program_id(0))
    length = tl.load(ends + tl.program_id(0) + 1) - start
    if tl.program_id(1) * TOKENS >= length:
        return
    first = (decoding + start).to(tl.int64)
    continues = tl.load(positions + first) > 0
    tokens = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    columns = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside, real = columns < channels, tokens < length
    rows = x + first * x_stride + columns
    history = states + tl.load(reads + tl.program_id(0)).to(tl.int64) * (TAPS - 1 + DRAFTS) * channels + columns
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        sources = tokens + (tap - TAPS + 1)
        factors = tl.load(weight + tap * channels + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(rows + sources * x_stride, mask=real & (sources >= 0) & inside, other=0.0).to(tl.float32)
        if tap < TAPS - 1:
            # An input before the chunk: the first ones of the history are the oldest.
            kept = history + (sources + TAPS - 1) * channels
            values += tl.load(kept, mask=real & (sources < 0) & continues & inside, other=0.0).to(tl.float32)
        total += values * factors
    total = _finished(total, bias, columns, inside, ACTIVATES)
    tl.store(out + (first + tokens) * channels + columns, total.to(out.dtype.element_ty), mask=real & inside)
    if tl.program_id(1) == 0:
        # The only program of these channels that reads the history, in all its threads, before it may write it.
        tl.debug_barrier()
        rest = tl.load(rests + tl.program_id(0))
        # The block that is read may be that of the checkpoint, which is written last; with one, `writes` has another block.
        for part in tl.static_range(2):
            target = tl.load((checkpoints if part else writes) + tl.program_id(0)).to(tl.int64)
            target = states + target * (TAPS - 1 + DRAFTS) * channels + columns
            is_written = inside & (rest > 0) if part else inside
            for place in tl.static_range(TAPS - 1):
                source = length - (TAPS - 1) + place
                if part:
                    source -= rest
                value = tl.load(rows + source * x_stride, mask=(source >= 0) & is_written, other=0.0).to(tl.float32)
                old = history + (source + TAPS - 1) * channels
                value += tl.load(old, mask=(source < 0) & continues & is_written, other=0.0).to(tl.float32)
                tl.store(target + place * channels, value.to(states.dtype.element_ty), mask=is_written)
