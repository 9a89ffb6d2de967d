"""Linear recurrences over the tokens of each sequence, from and to the states of a pool: see `operands.Recurrence`.

Decode rows are computed token by token: `recurrent_decode`. Chunks are computed in pieces of 64 tokens by
products of matrices (Yang et al. 2024, arXiv 2406.06484): a program has some columns of the state of a head in registers and takes
piece after piece. With the delta rule, the updates of a piece are the solution of a triangular system, which does not depend on
the state: a kernel before solves those of all pieces at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.batch.state_rows import PIECE, StateRows
from text_generation_shard.engines.torch.kernels.operands import Recurrence
from text_generation_shard.engines.torch.kernels.pdl import pdl
from text_generation_shard.engines.torch.kernels.recurrent_decode import decode_kernel, step_size, tile_for, unit

_COLUMNS = 32
"""Columns of the values of a program."""
_BLOCK = tl.constexpr(16)
"""Rows of a triangular system that are solved one after the other."""


def scan(
    qkv: Tensor,
    steps: Tensor,
    betas: Tensor | None,
    recurrence: Recurrence,
    states: Tensor,
    drafted: Tensor,
    rows: StateRows,
) -> Tensor:
    """Return the outputs [tokens, heads · value_width] in the dtype of `qkv`; updates the states.

    `qkv` [tokens, …] has queries, keys and values in the columns that `recurrence` says; `steps` and `betas` are [tokens, heads].
    Rows may have any distance. Products of chunks have operands of the dtype of `qkv`, of which float32 ones are rounded to eleven
    significant bits; everything else is float32. The outputs of padding rows, which have the spare block, are zeros.
    """
    heads, value_width = recurrence.heads, recurrence.value_width
    out = torch.empty(len(qkv), heads * value_width, dtype=qkv.dtype, device=qkv.device)
    key_block = max(triton.next_power_of_2(recurrence.key_width), 16)
    inputs = qkv, steps, betas
    numbers = recurrence.decay, recurrence.step_bias, recurrence.skip
    strides = qkv.stride(0), steps.stride(0), 0 if betas is None else betas.stride(0)
    shape = {
        "QUERY_START": recurrence.query_start,
        "KEY_START": recurrence.key_start,
        "VALUE_START": recurrence.value_start,
        "HEADS": heads,
        "SHARE": heads // recurrence.groups,
        "KEYS": recurrence.key_width,
        "VALUES": value_width,
        "DELTA": recurrence.delta,
        "BETA_SCALE": recurrence.beta_scale,
        "STEP_MIN": recurrence.step_limits[0],
        "STEP_MAX": recurrence.step_limits[1],
        "KEY_BLOCK": key_block,
    }
    if rows.decoding:
        drafts = drafted.shape[1] // 2
        columns, num_warps = tile_for(key_block, drafts)
        decode_kernel[(triton.cdiv(value_width, columns), heads, rows.decoding)](
            *inputs,
            *numbers,
            states,
            drafted,
            out,
            rows.blocks,
            rows.positions,
            rows.behind,
            *strides,
            len(states) - 1,
            **shape,
            COLUMNS=columns,
            DRAFTS=drafts,
            DRAFT_START=recurrence.drafted.start,
            DRAFT_WIDTH=recurrence.draft_width,
            num_warps=num_warps,
            **pdl(qkv),
        )
    if not rows.chunks:
        return out
    updates = reads = out  # not read without the delta rule
    if recurrence.delta:
        updates = torch.empty_like(out)
        reads = torch.empty(len(qkv), heads * recurrence.key_width, dtype=qkv.dtype, device=qkv.device)
        pieces = rows.most_pieces
        # For operands of 16 or 32 columns ptxas 12.8 computes the descriptor of the second HGMMA from a wrong register: it reads
        # outside of the shared memory.
        widths = {
            "KEY_BLOCK": max(key_block, PIECE),
            "VALUE_BLOCK": max(triton.next_power_of_2(value_width), PIECE),
        }
        _solve_kernel[(len(rows.chunks) * heads, pieces)](
            *inputs,
            *numbers,
            updates,
            reads,
            rows.ends,
            rows.rests,
            rows.decoding,
            *strides,
            **shape | widths,
            PIECE=PIECE,
        )
    _chunk_kernel[(len(rows.chunks) * heads, triton.cdiv(value_width, _COLUMNS))](
        *inputs,
        *numbers,
        updates,
        reads,
        states,
        out,
        rows.reads,
        rows.writes,
        rows.checkpoints,
        rows.positions,
        rows.ends,
        rows.rests,
        rows.decoding,
        *strides,
        **shape,
        COLUMNS=_COLUMNS,
        PIECE=PIECE,
        num_stages=1,
    )
    return out


@triton.jit
def _piece(piece: tl.tensor, length: tl.tensor, rest: tl.tensor, PIECE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the first token of a piece of a chunk, and the end of its part: the last `rest` tokens have pieces of their own."""
    before = length - rest
    pieces = tl.cdiv(before, PIECE)
    is_before = piece < pieces
    return tl.where(is_before, piece * PIECE, before + (piece - pieces) * PIECE), tl.where(is_before, before, length)


@triton.jit(do_not_specialize=["decoding"], do_not_specialize_on_alignment=["ends", "rests"])
def _solve_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    qkv: tl.tensor,
    steps: tl.tensor,
    betas: tl.tensor,
    decay: tl.tensor,
    step_bias: tl.tensor,
    skip: tl.tensor | None,
    updates: tl.tensor,
    reads: tl.tensor,
    ends: tl.tensor,
    rests: tl.tensor,
    decoding: int,
    qkv_stride: int,
    steps_stride: int,
    betas_stride: int,
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
    VALUE_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Write (I + A)⁻¹ · (beta · v) and (I + A)⁻¹ · (beta · since · k), where A[i, j] = beta[i] · between[i, j] · k[i]·k[j], j < i."""
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(ends + chunk)
    length = tl.load(ends + chunk + 1) - start
    begin, end = _piece(tl.program_id(1), length, tl.load(rests + chunk), PIECE)
    if begin >= length:
        return
    tokens = begin + tl.arange(0, PIECE)
    real = tokens < end
    rows = (decoding + start + tokens).to(tl.int64)
    dims, columns = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    own = qkv + rows[:, None] * qkv_stride
    is_key, is_value = real[:, None] & (dims < KEYS)[None, :], real[:, None] & (columns < VALUES)[None, :]
    vectors = own + KEY_START + (head // SHARE) * KEYS + dims[None, :]
    keys = unit(tl.load(vectors, mask=is_key, other=0.0).to(tl.float32), 1)
    raw = tl.load(steps + rows * steps_stride + head, mask=real, other=0.0)
    size = step_size(raw, tl.load(step_bias + head), STEP_MIN, STEP_MAX)
    total = tl.cumsum(tl.where(real, -tl.load(decay + head) * size, 0.0), 0)
    raw = tl.load(betas + rows * betas_stride + head, mask=real, other=0.0)
    beta = BETA_SCALE * tl.sigmoid(raw.to(tl.float32))
    beta = tl.where(real, beta, 0.0)

    places = tl.arange(0, PIECE)
    dtype = qkv.dtype.element_ty
    operand = keys.to(dtype)
    below = places[:, None] > places[None, :]
    between = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
    products = tl.dot(operand, tl.trans(operand), input_precision="tf32")
    system = tl.where(below, -beta[:, None] * products * between, 0.0)
    inverse = _inverse(system, PIECE).to(dtype)

    # Loaded after the inverse, which needs the registers.
    values = tl.load(own + VALUE_START + head * VALUES + columns[None, :], mask=is_value, other=0.0).to(tl.float32)
    scaled = (beta[:, None] * values).to(dtype)
    solution = tl.dot(inverse, scaled, input_precision="tf32").to(dtype)
    tl.store(updates + rows[:, None] * (HEADS * VALUES) + head * VALUES + columns[None, :], solution, mask=is_value)
    decayed = ((beta * tl.exp(total))[:, None] * keys).to(dtype)
    solution = tl.dot(inverse, decayed, input_precision="tf32").to(dtype)
    tl.store(reads + rows[:, None] * (HEADS * KEYS) + head * KEYS + dims[None, :], solution, mask=is_key)


@triton.jit
def _inverse(system: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return (I - system)⁻¹ for a matrix that is zero on and above its diagonal; SIZE is 64.

    Blocks on the diagonal by forward substitution, row after row of all of them at once. Then pairs of neighbours are joined: with
    inverses X and Y of the upper and the lower one and B below the upper one, the inverse has Y·B·X there.
    """
    numbers, places = tl.arange(0, SIZE // _BLOCK), tl.arange(0, _BLOCK)
    is_diagonal = numbers[:, None, None, None] == numbers[None, None, :, None]
    whole = tl.reshape(system, (SIZE // _BLOCK, _BLOCK, SIZE // _BLOCK, _BLOCK))
    blocks = tl.sum(tl.where(is_diagonal, whole, 0.0), axis=2)
    below = places[None, :, None]
    # Rows before `row` are those of the inverse without its diagonal.
    solved = blocks
    for row in range(1, _BLOCK):
        factors = tl.sum(tl.where(below == row, blocks, 0.0), axis=1)
        found = factors + tl.sum(factors[:, :, None] * tl.where(below < row, solved, 0.0), axis=1)
        solved = tl.where(below == row, found[:, None, :], solved)
    solved = tl.where(below == places[None, None, :], 1.0, solved)
    inverse = tl.reshape(tl.where(is_diagonal, solved[:, :, None, :], 0.0), (SIZE, SIZE))
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    for level in tl.static_range(2):
        row, column = rows // (_BLOCK << level), columns // (_BLOCK << level)
        is_between = (row // 2 == column // 2) & (row > column)
        between = tl.where(is_between, system, 0.0)
        inverse += tl.dot(inverse, tl.dot(between, inverse, input_precision="tf32"), input_precision="tf32")
    return inverse


@triton.jit(
    do_not_specialize=["decoding"],
    do_not_specialize_on_alignment=["state_reads", "state_writes", "checkpoints", "positions", "ends", "rests"],
)
def _chunk_kernel(  # noqa: PLR0913, PLR0915 – a kernel's arguments are flat
    qkv: tl.tensor,
    steps: tl.tensor,
    betas: tl.tensor | None,
    decay: tl.tensor,
    step_bias: tl.tensor,
    skip: tl.tensor | None,
    updates: tl.tensor,
    reads: tl.tensor,
    states: tl.tensor,
    out: tl.tensor,
    state_reads: tl.tensor,
    state_writes: tl.tensor,
    checkpoints: tl.tensor,
    positions: tl.tensor,
    ends: tl.tensor,
    rests: tl.tensor,
    decoding: int,
    qkv_stride: int,
    steps_stride: int,
    betas_stride: int,
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
    PIECE: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(ends + chunk)
    length = tl.load(ends + chunk + 1) - start
    first = decoding + start
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dims = tl.arange(0, KEY_BLOCK)
    inside, is_dim = columns < VALUES, dims < KEYS
    block, target = tl.load(state_reads + chunk).to(tl.int64), tl.load(state_writes + chunk).to(tl.int64)
    kept = (block * HEADS + head) * (KEYS * VALUES) + dims[:, None] * VALUES + columns[None, :]
    in_state = is_dim[:, None] & inside[None, :]
    continues = tl.load(positions + first) > 0
    state = tl.load(states + kept, mask=in_state & continues, other=0.0).to(tl.float32)
    rate, bias = tl.load(decay + head), tl.load(step_bias + head)
    dtype = qkv.dtype.element_ty
    places = tl.arange(0, PIECE)
    causal = places[:, None] >= places[None, :]
    rest = tl.load(rests + chunk)
    last_before = tl.cdiv(length - rest, PIECE) - 1
    for piece in range(last_before + 1 + tl.cdiv(rest, PIECE)):
        begin, end = _piece(piece, length, rest, PIECE)
        real = begin + places < end
        rows = (first + begin + places).to(tl.int64)
        own = qkv + rows[:, None] * qkv_stride
        vectors = own + (head // SHARE) * KEYS + dims[None, :]
        is_key, is_value = real[:, None] & is_dim[None, :], real[:, None] & inside[None, :]
        queries = tl.load(vectors + QUERY_START, mask=is_key, other=0.0).to(tl.float32)
        keys = tl.load(vectors + KEY_START, mask=is_key, other=0.0).to(tl.float32)
        size = step_size(tl.load(steps + rows * steps_stride + head, mask=real, other=0.0), bias, STEP_MIN, STEP_MAX)
        logs = tl.where(real, -rate * size, 0.0)
        total, last = tl.cumsum(logs, 0), tl.sum(logs, axis=0)
        rounded = state.to(dtype)
        if DELTA:
            queries, keys = unit(queries, 1) * (KEYS**-0.5), unit(keys, 1)
            read = tl.load(reads + rows[:, None] * (HEADS * KEYS) + head * KEYS + dims[None, :], mask=is_key, other=0.0)
            solved = updates + rows[:, None] * (HEADS * VALUES) + head * VALUES + columns[None, :]
            update = tl.load(solved, mask=is_value, other=0.0).to(tl.float32)
            update -= tl.dot(read, rounded, input_precision="tf32")
        else:
            sources = own + VALUE_START + head * VALUES + columns[None, :]
            values = tl.load(sources, mask=is_value, other=0.0).to(tl.float32)
            update = size[:, None] * values
        operand = update.to(dtype)
        between = tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0))
        products = tl.dot(queries.to(dtype), tl.trans(keys.to(dtype)), input_precision="tf32")
        weights = tl.where(causal, products * between, 0.0).to(dtype)
        result = tl.dot(weights, operand, input_precision="tf32")
        result += tl.exp(total)[:, None] * tl.dot(queries.to(dtype), rounded, input_precision="tf32")
        if skip is not None:
            result += tl.load(skip + head) * values
        targets = out + rows[:, None] * (HEADS * VALUES) + head * VALUES + columns[None, :]
        tl.store(targets, result.to(out.dtype.element_ty), mask=is_value)
        kept_keys = (keys * tl.exp(last - total)[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(kept_keys), operand, input_precision="tf32")
        if (rest > 0) & (piece == last_before):
            # Goes on from what is stored, as a sequence that continues from the checkpoint does.
            stored = state.to(states.dtype.element_ty)
            checkpoint = tl.load(checkpoints + chunk).to(tl.int64)
            tl.store(states + kept + (checkpoint - block) * HEADS * (KEYS * VALUES), stored, mask=in_state)
            state = stored.to(tl.float32)
    tl.store(states + kept + (target - block) * HEADS * (KEYS * VALUES), state, mask=in_state)
