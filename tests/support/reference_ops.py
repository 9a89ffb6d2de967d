"""What the element-wise kernels compute, in plain torch and for any float dtype: in float64 it judges them."""

from __future__ import annotations

import torch
from torch import Tensor

from text_generation_shard.engines.torch.model import ACTIVATIONS

_FLOAT32_ERROR = 1e-6


def rounded_once(out: Tensor, reference: Tensor) -> bool:
    """Whether `out` is float64 `reference` as computed in float32 and then rounded to `out`'s dtype.

    Judged by ‖out − reference‖, which a second rounding makes larger by √2, and any NaN makes infinite. A near tie that
    float32 rounds the other way leaves it as it is.
    """
    smallest = _relative_error(reference.to(out.dtype), reference)
    return _relative_error(out, reference) < 1.05 * smallest + _FLOAT32_ERROR


def _relative_error(out: Tensor, reference: Tensor) -> float:
    error = (out.double() - reference).norm() / reference.norm()
    return float(error.nan_to_num(nan=torch.inf))


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`values` [..., width] with a root mean square of one in each row, times `weight` [width]."""
    return values * (values.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def activate(gate_up: Tensor, kind: str) -> Tensor:
    """act(gate) · up [tokens, inner] of `gate_up` [tokens, 2·inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate) * up


def rotate(heads: Tensor, positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
    """`heads` [tokens, heads, head_dim], each turned by its token's position: x·cos + rotate_half(x)·sin."""
    angles = (positions.float().unsqueeze(1) * frequencies.float()).to(heads.dtype)  # float32 by definition
    cos = torch.cat((angles, angles), dim=-1).cos().unsqueeze(1) * scale
    sin = torch.cat((angles, angles), dim=-1).sin().unsqueeze(1) * scale
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
