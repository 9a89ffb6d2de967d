"""The operations of layers with a state in plain torch: on CPUs, and the reference of the kernels.

States are pools of blocks, which decode rows replace; a chunk may read from one and write to another. Sequences that continue by
one
token are computed as one batch, chunks of prompts one by one in pieces of CHUNK tokens: within a piece by products of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.batch.state_rows import StateRows
from text_generation_shard.engines.torch.kernels.operands import UNIT_EPS, Convolution, GatedNorm, Recurrence

CHUNK = 64


def convolve(x: Tensor, convolution: Convolution, states: Tensor, rows: StateRows) -> Tensor:
    """Return the convolved values [tokens, channels] of `x` [tokens, channels]; updates the states."""
    x = rows.in_plan_order(x)
    weight = convolution.weight.to(x.dtype)
    bias = None if convolution.bias is None else convolution.bias.to(x.dtype)
    taps, count = len(weight), rows.decoding
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if count:
        blocks = rows.blocks.long()
        window = torch.cat((states[blocks].to(x.dtype), x[:count].unsqueeze(1)), dim=1)
        states[blocks] = window[:, 1:].to(states.dtype)
        out[:count] = torch.einsum("rtc,tc->rc", window, weight)
        if bias is not None:
            out[:count] += bias
    for chunk in rows.chunks:
        own = slice(chunk.first, chunk.first + chunk.length)
        before = states[chunk.read].to(x.dtype)
        window = torch.cat((before if chunk.start else torch.zeros_like(before), x[own]))
        states[chunk.write] = window[len(window) - taps + 1 :].to(states.dtype)
        out[own] = functional.conv1d(window.t(), weight.t().unsqueeze(1), bias, groups=x.shape[1]).t()
    return rows.in_step_order(functional.silu(out) if convolution.activates else out)


def scan(
    qkv: Tensor, steps: Tensor, betas: Tensor | None, recurrence: Recurrence, states: Tensor, rows: StateRows
) -> Tensor:
    """Return the outputs [tokens, heads · value_width] of a recurrence; updates the states.

    `qkv` has queries, keys and values in the columns that `recurrence` says, `steps` and `betas` are [tokens, heads].
    """
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    qkv, steps = rows.in_plan_order(qkv).to(dtype), rows.in_plan_order(steps).to(dtype)
    sizes = functional.softplus(steps + recurrence.step_bias.to(dtype)).clamp(*recurrence.step_limits)
    decays = -recurrence.decay.to(dtype) * sizes
    if betas is not None:
        sizes = recurrence.beta_scale * rows.in_plan_order(betas).to(dtype).sigmoid()
    queries, keys, values = _parts(qkv, recurrence)
    out = torch.empty_like(values)
    count = rows.decoding
    if count:
        blocks = rows.blocks.long()
        state = states[blocks].to(dtype) * decays[:count, :, None, None].exp()
        update = values[:count]
        if recurrence.delta:
            update = update - torch.einsum("rhk,rhkv->rhv", keys[:count], state)
        state += keys[:count].unsqueeze(3) * (sizes[:count].unsqueeze(2) * update).unsqueeze(2)
        states[blocks] = state.to(states.dtype)
        out[:count] = torch.einsum("rhk,rhkv->rhv", queries[:count], state)
    for chunk in rows.chunks:
        state = states[chunk.read].to(dtype) if chunk.start else torch.zeros_like(states[chunk.read], dtype=dtype)
        end = chunk.first + chunk.length
        for first in range(chunk.first, end, CHUNK):
            own = slice(first, min(first + CHUNK, end))
            parts = [each[own].transpose(0, 1) for each in (queries, keys, values, decays, sizes)]
            result, state = _piece(parts, state, delta=recurrence.delta)
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


def _parts(qkv: Tensor, recurrence: Recurrence) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys [tokens, heads, key_width] and values [tokens, heads, value_width]."""
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
    return queries, keys, values.view(-1, recurrence.heads, recurrence.value_width)


def _piece(parts: Sequence[Tensor], state: Tensor, *, delta: bool) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of some tokens, from a state [heads, key_width, value_width].

    `parts` [heads, tokens, …] are queries, keys, values, the logarithms of decays, and the sizes of steps or betas.
    """
    queries, keys, values, decays, sizes = parts
    total = decays.cumsum(1)
    # Masked before exp: the differences of later tokens are positive and may overflow.
    between = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(
        torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1), -torch.inf
    )
    between, since = between.exp(), total.exp().unsqueeze(2)
    updates = sizes.unsqueeze(2) * values
    if delta:
        scaled = sizes.unsqueeze(2) * keys
        system = (scaled @ keys.transpose(1, 2)) * between
        targets = torch.cat((updates, scaled * since), dim=2)
        solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
        updates, reads = solved[..., : values.shape[2]], solved[..., values.shape[2] :]
        updates = updates - reads @ state
    out = (queries * since) @ state + ((queries @ keys.transpose(1, 2)) * between) @ updates
    rest = (total[:, -1:] - total).exp().unsqueeze(2)
    return out, state * since[:, -1:] + (keys * rest).transpose(1, 2) @ updates
