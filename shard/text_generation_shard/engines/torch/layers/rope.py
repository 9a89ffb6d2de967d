"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864), with the frequencies of transformers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_TABLE_CHUNK = 4096
"""Positions whose angles are held at once while a table is computed."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding; the fields are those of transformers' `rope_parameters`."""

    type: str
    """One of `rope_config.ROPE_TYPES`, or `longrope`."""
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    partial: float = 1.0
    """The part of a head that is rotated."""
    interleaved: bool = False
    """True: dimensions 2i and 2i + 1 are rotated together, not i and i + half."""
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies of `longrope`."""
    axes: tuple[int, ...] = ()
    """The axis of the rotary position of each rotated pair, for models whose images have three; empty: a position has one."""
    query_beta: float = 0.0
    """Queries are multiplied by 1 + query_beta · ln(1 + ⌊position / original_max_positions⌋) after the rotation."""

    def rotary_dim(self, head_dim: int) -> int:
        if self.type == "proportional":
            return 2 * int(head_dim * self.partial // 2)
        return int(head_dim * self.partial)


NO_ROPE = Rope("default", 1.0, partial=0.0)
"""No dimension is rotated."""


class RotaryEmbedding:
    """The rotation x·cos + rotate_half(x)·sin of query and key heads, for the layers with the same parameters.

    All pairs are (i, i + head_dim / 2). Where a checkpoint has others, `head_order` says how the dimensions of its query and key
    heads are reordered: products of query and key do not change. Dimensions that are not rotated have frequency 0.
    """

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        frequencies, scale = inverse_frequencies(rope, head_dim)
        self.rope = rope
        self._axes = torch.tensor((*rope.axes, *(0,) * (head_dim // 2))[: head_dim // 2], device=device)
        self._half = head_dim // 2
        rest = torch.zeros(self._half - len(frequencies))
        self._frequencies = torch.cat((frequencies, rest)).to(device)
        self._scale = torch.cat((torch.full_like(frequencies, scale), rest + 1.0)).to(device)
        self.table = torch.empty(0, device=device)
        """float32 [max_positions, 2, head_dim / 2], cos and sin, if it is given or after `fill_table`."""

    def fill_table(self, max_positions: int) -> None:
        """Compute `table`, for kernels that read the factors of a position, if it does not have them yet.

        An angle is the float32 product of position and frequency, as in transformers: a more precise one would give different
        results at high positions.
        """
        if len(self.table) >= max_positions:
            return
        device = self._frequencies.device
        self.table = torch.empty(max_positions, 2, self._half, dtype=torch.float32, device=device)
        for start in range(0, max_positions, _TABLE_CHUNK):
            chunk = self.table[start : start + _TABLE_CHUNK]
            positions = torch.arange(start, start + len(chunk), device=device).unsqueeze(1).float()
            angles = positions * self._frequencies
            torch.cos(angles, out=chunk[:, 0])
            torch.sin(angles, out=chunk[:, 1])
        self.table.mul_(self._scale)

    def rows(self, positions: Tensor) -> Tensor:
        """Return the rows of `table` for positions [3, tokens] in each axis: [tokens, 2, head_dim / 2]."""
        pairs = torch.arange(self._half, device=positions.device)
        return self.table[positions[self._axes].T, :, pairs].transpose(1, 2).contiguous()

    def factors(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin, each [tokens, 1, head_dim], for `positions` [tokens], or [3, tokens] in each axis.

        Computed in float32.

        The sign of rotate_half is folded into sin, so that rotate_half becomes a roll by half a head.
        """
        if len(self.table):
            cos, sin = self.table[positions].unbind(1)
        else:
            by_pair = positions.unsqueeze(1) if positions.ndim == 1 else positions[self._axes].T
            angles = by_pair.float() * self._frequencies
            cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return (
            torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1),
        )

    def rotate(self, heads: Tensor, factors: tuple[Tensor, Tensor]) -> None:
        """Rotate `heads` [tokens, heads, head_dim] in place: transformers' `apply_rotary_pos_emb`."""
        cos, sin = factors
        rolled = heads.roll(self._half, -1)
        heads.mul_(cos).addcmul_(rolled, sin)

    def query_factors(self, positions: Tensor) -> Tensor:
        """Return the factors of the queries by position: see `Rope.query_beta`."""
        passed = (positions // self.rope.original_max_positions).float()
        return 1 + self.rope.query_beta * torch.log1p(passed)


def head_order(rope: Rope, head_dim: int) -> list[int] | None:
    """Return the dimension of a checkpoint's head at each of ours; None if they are the same."""
    if rope.type == "proportional":
        return None
    rotary_dim = rope.rotary_dim(head_dim)
    if rope.interleaved:
        first, second = list(range(0, rotary_dim, 2)), list(range(1, rotary_dim, 2))
    else:
        first, second = list(range(rotary_dim // 2)), list(range(rotary_dim // 2, rotary_dim))
    middle = (rotary_dim + head_dim) // 2
    order = [*first, *range(rotary_dim, middle), *second, *range(middle, head_dim)]
    return None if order == list(range(head_dim)) else order


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Return the frequencies of the rotated pairs, and the factor for cos and sin: to the bit those of transformers."""
    rotary_dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32)
    exponents /= head_dim if rope.type == "proportional" else rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type in ("linear", "proportional"):
        return frequencies / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.type == "yarn":
        return _yarn(rope, rotary_dim, exponents), rope.attention_factor or _yarn_attention_factor(rope)
    if rope.type == "longrope":
        scale = rope.attention_factor or _longrope_attention_factor(rope)
        return 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents), scale
    return frequencies, 1.0


def _longrope_attention_factor(rope: Rope) -> float:
    """transformers' `_compute_longrope_parameters` (Ding et al. 2024, arXiv 2402.13753)."""
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))


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
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
