"""Linear recurrences of decode rows: see `operands.Recurrence`.

A row is computed by one program for each head and some columns of its values, with their part of the state in registers: first the
drafts that the state lacks, whose inputs a pool keeps, then the first token of the step, after which the state is written, then its
drafts. So the state is read and written once, however many tokens a row has.
"""

import triton
import triton.language as tl

from text_generation_shard.engines.torch.kernels.convolution import row_length
from text_generation_shard.engines.torch.kernels.operands import UNIT_EPS
from text_generation_shard.engines.torch.kernels.pdl import after_previous
from text_generation_shard.engines.torch.kernels.rows import row_tile

_COLUMNS, _DRAFT_COLUMNS = 64, 32
"""Columns of the values of a program, without and with drafts: the best of 16 to 128 on an H200, for states in float32 and bfloat16."""
_ELEMENTS_PER_THREAD = 128
"""Numbers of a state: with half as many, rows with drafts take up to 1.5 times as long on an H200; with twice as many, registers spill."""
_UNIT_EPS = tl.constexpr(UNIT_EPS)


def tile_for(key_block: int, drafts: int) -> tuple[int, int]:
    """Return the columns of the values and the warps of a program that has `key_block` rows of a state."""
    columns = _DRAFT_COLUMNS if drafts else _COLUMNS
    _, num_warps = row_tile(key_block * columns, _ELEMENTS_PER_THREAD)
    return columns, num_warps


@triton.jit
def step_size(steps: tl.tensor, step_bias: tl.tensor, STEP_MIN: tl.constexpr, STEP_MAX: tl.constexpr) -> tl.tensor:
    """Return clamp(softplus(steps + bias))."""
    x = steps.to(tl.float32) + step_bias
    power = tl.exp(-tl.abs(x))
    # log(1 + p), by its series where 1 + p would drop bits of p.
    size = tl.maximum(x, 0.0) + tl.where(power < 1e-3, power * (1.0 - 0.5 * power), tl.log(1.0 + power))
    return tl.minimum(tl.maximum(size, STEP_MIN), STEP_MAX)


@triton.jit
def unit(vectors: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Return vectors of unit length."""
    return vectors * tl.rsqrt(tl.sum(vectors * vectors, axis=axis, keep_dims=True) + _UNIT_EPS)


@triton.jit
def _advanced(  # noqa: PLR0913 – a kernel's arguments are flat
    state: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    step: tl.tensor,
    beta: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    DELTA: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    STEP_MIN: tl.constexpr,
    STEP_MAX: tl.constexpr,
) -> tl.tensor:
    """Return the state after a token more."""
    size = step_size(step, bias, STEP_MIN, STEP_MAX)
    state *= tl.exp(-rate * size)
    keys, values = keys.to(tl.float32), values.to(tl.float32)
    if DELTA:
        keys = unit(keys, 0)
        update = BETA_SCALE * tl.sigmoid(beta.to(tl.float32)) * (values - tl.sum(state * keys[:, None], axis=0))
    else:
        update = size * values
    return state + keys[:, None] * update[None, :]


@triton.jit(do_not_specialize_on_alignment=["blocks", "positions", "behind"])
def decode_kernel(  # noqa: C901, PLR0913, PLR0915 – a kernel's arguments are flat
    qkv: tl.tensor,
    steps: tl.tensor,
    betas: tl.tensor | None,
    decay: tl.tensor,
    step_bias: tl.tensor,
    skip: tl.tensor | None,
    states: tl.tensor,
    drafted: tl.tensor,
    out: tl.tensor,
    blocks: tl.tensor,
    positions: tl.tensor,
    behind: tl.tensor,
    qkv_stride: int,
    steps_stride: int,
    betas_stride: int,
    spare_block: int,
    QUERY_START: tl.constexpr,
    KEY_START: tl.constexpr,
    VALUE_START: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DELTA: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    STEP_MIN: tl.constexpr,
    STEP_MAX: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFT_START: tl.constexpr,
    DRAFT_WIDTH: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    after_previous(USE_PDL)
    # Parts of a state are read side by side: with all first parts before the second ones the programs took 16 % longer.
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < VALUES
    target = out + row * (HEADS * VALUES) + head * VALUES + columns
    block = tl.load(blocks + row)
    if block == spare_block:
        tl.store(target, tl.zeros([COLUMNS], out.dtype.element_ty), mask=inside)
        return
    dims = tl.arange(0, KEY_BLOCK)
    real = dims < KEYS
    key_place, value_place = KEY_START + (head // SHARE) * KEYS + dims, VALUE_START + head * VALUES + columns
    if DRAFTS:
        length = row_length(blocks, row, tl.num_programs(2), DRAFTS)
        if length == 0:
            return
        position, lacking = tl.load(positions + row), tl.load(behind + row)
        kept_of_row = drafted + block.to(tl.int64) * ((2 * DRAFTS + 1) * DRAFT_WIDTH)
    else:
        length = 1
    rate, bias = tl.load(decay + head), tl.load(step_bias + head)
    places = states + (block.to(tl.int64) * HEADS + head) * (KEYS * VALUES) + dims[:, None] * VALUES + columns[None, :]
    state = tl.load(places, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
    if DRAFTS:
        for place in range(lacking):
            kept = kept_of_row + (position - lacking + place) % (2 * DRAFTS + 1) * DRAFT_WIDTH
            keys = tl.load(kept + key_place - DRAFT_START, mask=real, other=0.0)
            values = tl.load(kept + value_place - DRAFT_START, mask=inside, other=0.0)
            others = kept + DRAFT_WIDTH - (1 + DELTA) * HEADS + head
            step = tl.load(others)
            beta = tl.load(others + HEADS) if DELTA else step
            state = _advanced(state, keys, values, step, beta, rate, bias, DELTA, BETA_SCALE, STEP_MIN, STEP_MAX)
            # As if it had been written and read.
            state = state.to(states.dtype.element_ty).to(tl.float32)
    for place in range(length):
        at = row + place
        own = qkv + at * qkv_stride
        keys = tl.load(own + key_place, mask=real, other=0.0)
        values = tl.load(own + value_place, mask=inside, other=0.0)
        queries = tl.load(own + QUERY_START + (head // SHARE) * KEYS + dims, mask=real, other=0.0).to(tl.float32)
        step = tl.load(steps + at * steps_stride + head)
        if DELTA:
            queries = unit(queries, 0) * (KEYS**-0.5)
        beta = tl.load(betas + at * betas_stride + head) if DELTA else step
        state = _advanced(state, keys, values, step, beta, rate, bias, DELTA, BETA_SCALE, STEP_MIN, STEP_MAX)
        result = tl.sum(state * queries[:, None], axis=0)
        if skip is not None:
            result += tl.load(skip + head) * values.to(tl.float32)
        tl.store(target + place * (HEADS * VALUES), result.to(out.dtype.element_ty), mask=inside)
        rounded = state.to(states.dtype.element_ty)
        if place == 0:
            tl.store(places, rounded, mask=real[:, None] & inside[None, :])
        if DRAFTS:
            if place > 0:
                kept = kept_of_row + (position + place) % (2 * DRAFTS + 1) * DRAFT_WIDTH
                others = kept + DRAFT_WIDTH - (1 + DELTA) * HEADS + head
                # Programs of one group of heads write the same keys.
                tl.store(kept + key_place - DRAFT_START, keys, mask=real)
                tl.store(kept + value_place - DRAFT_START, values, mask=inside)
                tl.store(others, step)
                if DELTA:
                    tl.store(others + HEADS, beta)
            state = rounded.to(tl.float32)
