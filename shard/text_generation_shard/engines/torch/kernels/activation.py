"""The gated activation of the MLP: act(gate) · up, on the output of the fused gate and up projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Columns per program: eight per thread, with four warps."""


def activate(gate_up: Tensor, kind: str, out: Tensor) -> None:
    """out = act(gate) · up, computed in float32 and rounded once.

    `gate_up` [tokens, 2·inner] with the gate's columns first, `out` [tokens, inner], both in any float dtype.
    `kind` is the activation name of model configs: "silu", "gelu" or "gelu_pytorch_tanh".
    """
    tokens, inner = out.shape
    _activate_kernel[(tokens, triton.cdiv(inner, _BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        KIND=kind,
        INNER=inner,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _activate_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    gate_up_stride: int,
    out_stride: int,
    KIND: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    row = gate_up + token * gate_up_stride
    gate = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + INNER + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + columns, (activated(gate, KIND) * up).to(out.dtype.element_ty), mask=inside)


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
