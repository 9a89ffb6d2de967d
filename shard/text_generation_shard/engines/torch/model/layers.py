"""Layers of the decoder on a CPU: linear layers and rotary position embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.model.config import Rope

TYPICAL_ROWS = 16
"""Rows of x that oneDNN optimizes the weight layout for; measured, 1 to 512 give the same layout and speed."""


class CpuLinear:
    """y = x·Wᵀ + b with a weight [outputs, inputs] and an optional bias [outputs]. Load the weight, process it, then call."""

    def __init__(
        self, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        self.weight = torch.empty(outputs, inputs, device=device, dtype=dtype)
        self.bias = torch.empty(outputs, device=device, dtype=dtype) if bias else None
        self._packed = False

    def process_weights_after_loading(self) -> None:
        """Reorder the loaded weight for oneDNN, which otherwise does so at every call: half of a decode step's time."""
        if _packs(self.weight):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, TYPICAL_ROWS)
            self._packed = True

    def __call__(self, x: Tensor) -> Tensor:
        """Return y [rows, outputs] for x [rows, inputs]."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        return functional.linear(x, self.weight, self.bias)


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class RotaryEmbedding:
    """Computes the factors of x·cos + rotate_half(x)·sin (Su et al. 2021, arXiv 2104.09864); frequencies as in transformers."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        frequencies, self._scale = inverse_frequencies(rope, head_dim)
        self._frequencies = frequencies.to(device)
        self._dtype = dtype
        self._half = head_dim // 2

    def factors(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin, each [tokens, 1, head_dim], for `positions` [tokens]. Computed in float32.

        The sign of rotate_half is folded into sin, so that rotate_half becomes a roll by half a head.
        """
        angles = positions.unsqueeze(1).float() * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return (
            torch.cat((cos, cos), dim=-1).to(self._dtype).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).to(self._dtype).unsqueeze(1),
        )

    def rotate(self, heads: Tensor, factors: tuple[Tensor, Tensor]) -> None:
        """Rotate `heads` [tokens, heads, head_dim] in place: transformers' `apply_rotary_pos_emb`."""
        cos, sin = factors
        rolled = heads.roll(self._half, -1)
        heads.mul_(cos).addcmul_(rolled, sin)


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Return the frequencies [head_dim / 2] in float32, and the factor for cos and sin.

    The formulas of transformers' ROPE_INIT_FUNCTIONS, operation by operation, so that the bits agree.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.type == "yarn":
        return _yarn(rope, head_dim, exponents), _yarn_attention_factor(rope)
    return frequencies, 1.0


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """transformers' `_compute_llama3_parameters`: low frequencies are scaled down, high ones kept, the rest interpolated."""
    low_wavelength = rope.original_max_positions / rope.low_freq_factor
    high_wavelength = rope.original_max_positions / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > low_wavelength, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = ~(wavelengths < high_wavelength) * ~(wavelengths > low_wavelength)
    return torch.where(between, blended, scaled)


def _yarn(rope: Rope, head_dim: int, exponents: Tensor) -> Tensor:
    """transformers' `_compute_yarn_parameters` (Peng et al. 2023, arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        """Return the dimension that makes `rotations` turns over the original length."""
        return (head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    steps = rope.theta**exponents
    keep = 1 - ramp
    return (1.0 / (rope.factor * steps)) * (1 - keep) + (1.0 / steps) * keep


def _yarn_attention_factor(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
