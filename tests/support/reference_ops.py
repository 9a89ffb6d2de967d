"""References of the element-wise kernels in plain torch, for any float dtype; tests use float64. The error of a result."""

from __future__ import annotations

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.operands import ACTIVATIONS
from text_generation_shard.engines.torch.kernels.packed_weight import PackedWeight
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import E2M1

_FLOAT32_ERROR = 1e-6


def rounded_once(out: Tensor, reference: Tensor) -> bool:
    """Return True if `out` is the float64 `reference`, computed in float32 and rounded once to the dtype of `out`.

    Compares ‖out − reference‖, which a second rounding increases by √2 and any NaN makes infinite. Near ties that float32
    rounds differently do not matter.
    """
    smallest = relative_error(reference.to(out.dtype), reference)
    return relative_error(out, reference) < 1.05 * smallest + _FLOAT32_ERROR


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Return ‖out − reference‖ / ‖reference‖ in float64; infinite if a value is NaN."""
    assert out.shape == reference.shape
    error = (out.double() - reference.double()).norm() / reference.double().norm()
    return float(error.nan_to_num(nan=torch.inf))


def rms_norm(values: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    """Return `values` [..., width], scaled to a root mean square of 1 in each row, times `weight` [width] or a number."""
    return values * (values.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def activate(gate_up: Tensor, kind: str) -> Tensor:
    """Return act(gate) · up [tokens, inner] for `gate_up` [tokens, 2·inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate) * up


def rotate(heads: Tensor, positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
    """Return x·cos + rotate_half(x)·sin for `heads` [tokens, heads, head_dim] at the tokens' positions."""
    angles = (positions.float().unsqueeze(1) * frequencies.float()).to(heads.dtype)  # defined in float32
    cos = torch.cat((angles, angles), dim=-1).cos().unsqueeze(1) * scale
    sin = torch.cat((angles, angles), dim=-1).sin().unsqueeze(1) * scale
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def dequantized(weight: PackedWeight) -> Tensor:
    """Return the weight in float32."""
    (outputs, groups), bits = weight.scales.shape, weight.bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=weight.words.device)
    codes = (weight.words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    codes = codes.view(outputs, -1, weight.plane, 32 // bits).transpose(2, 3).reshape(outputs, groups, -1)
    if not weight.floats:
        values = codes.float() - (1 << (bits - 1) if weight.zeros is None else weight.zeros.unsqueeze(2).float())
    elif bits == 8:
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        values = torch.tensor(E2M1, device=codes.device)[codes]
    return (values * weight.scales.float().unsqueeze(2)).view(outputs, -1)
