"""The operations of layers with a state in plain torch: on CPUs, and the reference of the kernels.

States are pools of blocks, which decode rows replace; a chunk may read from one and write to another. Decode rows are computed token
by token as one batch, chunks of prompts one by one in pieces of PIECE tokens: within a piece by products of matrices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.batch.state_rows import PIECE, StateRows
from text_generation_shard.engines.torch.kernels.operands import UNIT_EPS, Convolution, GatedNorm, Recurrence


def convolve(x: Tensor, convolution: Convolution, states: Tensor, rows: StateRows) -> Tensor:
    """Return the convolved values [tokens, channels] of `x` [tokens, channels]; updates the states."""
    x = rows.in_plan_order(x)
    weight = convolution.weight.to(x.dtype)
    bias = None if convolution.bias is None else convolution.bias.to(x.dtype)
    taps = len(weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows.decoding:
        decoding = rows.decode_rows
        kept = states[decoding.blocks, : taps - 1]
        if decoding.most_behind:
            places = decoding.behind.unsqueeze(1) + torch.arange(taps - 1, device=x.device)
            kept = states[decoding.blocks, : taps - 1 + decoding.most_behind].take_along_dim(places.unsqueeze(2), dim=1)
        window = torch.cat((kept.to(x.dtype), *(x[tokens].unsqueeze(1) for tokens, _, _ in decoding.tokens)), dim=1)
        states[decoding.blocks, : window.shape[1] - 1] = window[:, 1:].to(states.dtype)
        for place, (_, has_token, tokens) in enumerate(decoding.tokens):
            result = torch.einsum("rtc,tc->rc", window[has_token, place : place + taps], weight)
            out[tokens] = result if bias is None else result + bias
    for chunk in rows.parts:
        own = slice(chunk.first, chunk.first + chunk.length)
        before = states[chunk.read, : taps - 1].to(x.dtype)
        window = torch.cat((before if chunk.start else torch.zeros_like(before), x[own]))
        states[chunk.write, : taps - 1] = window[len(window) - taps + 1 :].to(states.dtype)
        out[own] = functional.conv1d(window.t(), weight.t().unsqueeze(1), bias, groups=x.shape[1]).t()
    return rows.in_step_order(functional.silu(out) if convolution.activates else out)


def scan(
    qkv: Tensor,
    steps: Tensor,
    betas: Tensor | None,
    recurrence: Recurrence,
    states: Tensor,
    drafted: Tensor,
    rows: StateRows,
) -> Tensor:
    """Return the outputs [tokens, heads · value_width] of a recurrence; updates the states.

    `qkv` has queries, keys and values in the columns that `recurrence` says, `steps` and `betas` are [tokens, heads].
    """
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    inputs = [rows.in_plan_order(each) for each in (qkv, steps, betas) if each is not None]
    parts = _parts(inputs, recurrence, dtype)
    values = parts[2]
    out = torch.empty_like(values)
    if rows.decoding:
        decoding = rows.decode_rows
        state = states[decoding.blocks].to(dtype)
        for place in range(-decoding.most_behind, 0):
            kept = drafted[decoding.blocks, (decoding.positions + place) % drafted.shape[1]]
            before = _parts(_draft_inputs(kept, recurrence, qkv.shape[1]), recurrence, dtype)
            added = state.clone()
            _token(before, added, delta=recurrence.delta)
            state = torch.where((decoding.behind >= -place).view(-1, 1, 1, 1), added.to(states.dtype).to(dtype), state)
        for place, (tokens, has_token, real) in enumerate(decoding.tokens):
            out[real] = _token([each[tokens] for each in parts], state, delta=recurrence.delta)[has_token]
            state = state.to(states.dtype)
            if place:
                convolved, *others = [each[real] for each in inputs]
                kept = torch.cat((convolved[:, recurrence.drafted], *others), dim=1)
                places = (decoding.positions[has_token] + place) % drafted.shape[1]
                drafted[decoding.blocks[has_token], places] = kept.to(drafted.dtype)
            else:
                states[decoding.blocks] = state
            state = state.to(dtype)
    for chunk in rows.parts:
        state = states[chunk.read].to(dtype) if chunk.start else torch.zeros_like(states[chunk.read], dtype=dtype)
        end = chunk.first + chunk.length
        for first in range(chunk.first, end, PIECE):
            own = slice(first, min(first + PIECE, end))
            of_piece = [each[own].transpose(0, 1) for each in parts]
            result, state = _piece(of_piece, state, delta=recurrence.delta)
            out[own] = result.transpose(0, 1)
        states[chunk.write] = state.to(states.dtype)
    if recurrence.skip is not None:
        out += recurrence.skip.to(dtype).view(-1, 1) * values
    return rows.in_step_order(out.flatten(1))


def gated_norm(x: Tensor, gate: Tensor, norm: GatedNorm, out: Tensor | None = None) -> Tensor:
    """Return the normed and gated values of `x` [tokens, columns], in the dtype of `gate` or in `out`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, factors = x.to(dtype), functional.silu(gate.to(dtype))
    if norm.weight is None:
        result = x * factors
        return result.to(gate.dtype) if out is None else out.copy_(result)
    groups = (x * factors if norm.gate_first else x).view(len(x), -1, norm.width)
    normed = functional.rms_norm(groups, (norm.width,), None, norm.eps).flatten(1) * norm.weight.to(dtype)
    result = normed if norm.gate_first else normed * factors
    return result.to(gate.dtype) if out is None else out.copy_(result)


def _draft_inputs(kept: Tensor, recurrence: Recurrence, width: int) -> list[Tensor]:
    """Return the inputs of drafts that a pool kept: convolved values [tokens, width], with zeros as queries, steps, and betas if any."""
    columns = recurrence.drafted
    qkv = kept.new_zeros(len(kept), width)
    qkv[:, columns] = kept[:, : columns.stop - columns.start]
    return [qkv, *torch.split(kept[:, columns.stop - columns.start :], recurrence.heads, dim=1)]


def _parts(inputs: Sequence[Tensor], recurrence: Recurrence, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return queries, keys [tokens, heads, key_width], values [tokens, heads, value_width], and for each head [tokens, heads] the
    logarithms of decays, and the sizes of steps or betas. `inputs`: convolved values, steps, and betas if any.
    """
    qkv, steps, *betas = (each.to(dtype) for each in inputs)
    sizes = functional.softplus(steps + recurrence.step_bias.to(dtype)).clamp(*recurrence.step_limits)
    decays = -recurrence.decay.to(dtype) * sizes
    for each in betas:
        sizes = recurrence.beta_scale * each.sigmoid()
    groups, width = recurrence.groups, recurrence.key_width

    def of_groups(start: int) -> Tensor:
        vectors = qkv[:, start : start + groups * width].view(-1, groups, width)
        if recurrence.delta:
            vectors = vectors * (vectors.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()
        return vectors.repeat_interleave(recurrence.heads // groups, dim=1)

    queries, keys = of_groups(recurrence.query_start), of_groups(recurrence.key_start)
    if recurrence.delta:
        queries = queries * width**-0.5
    start = recurrence.value_start
    values = qkv[:, start : start + recurrence.heads * recurrence.value_width]
    return queries, keys, values.view(-1, recurrence.heads, recurrence.value_width), decays, sizes


def _token(parts: Sequence[Tensor], state: Tensor, *, delta: bool) -> Tensor:
    """Add one token more to each of the states [rows, heads, key_width, value_width]; return its outputs. `parts`: see `_parts`."""
    queries, keys, values, decays, sizes = parts
    state *= decays[:, :, None, None].exp()
    update = values - torch.einsum("rhk,rhkv->rhv", keys, state) if delta else values
    state += keys.unsqueeze(3) * (sizes.unsqueeze(2) * update).unsqueeze(2)
    return torch.einsum("rhk,rhkv->rhv", queries, state)


def _piece(parts: Sequence[Tensor], state: Tensor, *, delta: bool) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of some tokens, from a state [heads, key_width, value_width].

    `parts` [heads, tokens, …] are queries, keys, values, the logarithms of decays, and the sizes of steps or betas.
    """
    queries, keys, values, decays, sizes = parts
    # Sums are in the hundreds where decays are fast: their differences in float32 are wrong by 1e-5.
    total = decays.cumsum(1, dtype=torch.float64)
    between, rest = total.unsqueeze(2) - total.unsqueeze(1), total[:, -1:] - total
    # Masked before exp: the differences of later tokens are positive and may overflow.
    later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1)
    between = between.to(decays.dtype).masked_fill(later, -torch.inf).exp()
    rest, since = (each.to(decays.dtype).exp().unsqueeze(2) for each in (rest, total))
    updates = sizes.unsqueeze(2) * values
    if delta:
        scaled = sizes.unsqueeze(2) * keys
        system = (scaled @ keys.transpose(1, 2)) * between
        targets = torch.cat((updates, scaled * since), dim=2)
        solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
        updates, reads = solved[..., : values.shape[2]], solved[..., values.shape[2] :]
        updates = updates - reads @ state
    out = (queries * since) @ state + ((queries @ keys.transpose(1, 2)) * between) @ updates
    return out, state * since[:, -1:] + (keys * rest).transpose(1, 2) @ updates
