"""The gated activation of the MLP: act(gate) · up, on the output of the fused gate and up projection."""

import triton
import triton.language as tl
from torch import Tensor

from text_generation_shard.engines.torch.kernels.operands import GatedActivation
from text_generation_shard.engines.torch.kernels.pdl import after_previous, pdl

_BLOCK = 1024
"""Columns per program: eight per thread, with four warps."""


def activate(
    gate_up: Tensor,
    activation: GatedActivation,
    out: Tensor,
    change: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    ends: Tensor | None = None,
) -> None:
    """out = act(gate) · up, computed in float32 and rounded once.

    `gate_up` [tokens, 2·inner], `out` [tokens, inner], both in any float dtype. `change`, shaped as `gate_up`, is added to it before.
    So is `bias` [experts, 2·inner], contiguous, of rows in the order of their experts; `ends` int32 [experts] has the end of each
    expert's rows.
    """
    tokens, inner = out.shape
    step, up = (2, 1) if activation.interleaved else (1, inner)
    experts = 0 if ends is None else len(ends)
    _activate_kernel[(tokens, triton.cdiv(inner, _BLOCK))](
        gate_up,
        bias,
        ends,
        change,
        out,
        gate_up.stride(0),
        0 if change is None else change.stride(0),
        out.stride(0),
        step,
        up,
        activation.alpha,
        activation.limit,
        KIND=activation.kind,
        INNER=inner,
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts),
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl(gate_up),
    )


@triton.jit
def _activate_kernel(  # noqa: PLR0913 – a kernel's arguments are flat
    gate_up: tl.tensor,
    bias: tl.tensor | None,
    ends: tl.tensor | None,
    change: tl.tensor | None,
    out: tl.tensor,
    gate_up_stride: int,
    change_stride: int,
    out_stride: int,
    step: int,
    up_distance: int,
    alpha: float,
    limit: float,
    KIND: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    after_previous(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    at = gate_up + row * gate_up_stride + columns * step
    gate, up = gate_and_up(at, bias, ends, row, columns * step, inside, up_distance, INNER, EXPERTS, BINS)
    if change is not None:
        change_at = change + row * change_stride + columns * step
        gate += tl.load(change_at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(change_at + up_distance, mask=inside, other=0.0).to(tl.float32)
    values = gated(gate, up, alpha, limit, KIND)
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_and_up(  # noqa: PLR0913 – a kernel's arguments are flat
    at: tl.tensor,
    bias: tl.tensor | None,
    ends: tl.tensor | None,
    row: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    up_distance: int,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load gates from `at`, their `places` in a row, and ups, with the bias of the row's expert; BINS is a power of two from EXPERTS on."""
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + up_distance, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        experts = tl.arange(0, BINS)
        all_ends = tl.load(ends + experts, mask=experts < EXPERTS, other=2147483647)
        expert = tl.sum((all_ends <= row).to(tl.int32), axis=0)
        bias_at = bias + expert * 2 * INNER + places
        gate += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias_at + up_distance, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """act(gate) · up, in float32: see GatedActivation."""
    if KIND == "clamped_swiglu":
        gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
        values = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    else:
        values = activated(gate, KIND) * up
    return values


@triton.jit
def activated(gate: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """act(gate), in float32."""
    if KIND == "silu":
        active = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_pytorch_tanh", "unknown activation")
        # (1 + tanh z) / 2 = sigmoid(2z).
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return active
