"""Quantized weights as our products of a few or tens of rows read them: in FP8, and packed codes in orders of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

WORD_BITS = 32
PLANES = (16, 8, 4)
"""Words of a block: the most that divide a group are used, so that x is read in the longest pieces."""
MAX_SHIFT = 12
"""The largest exponent of 0.5 in E4M3 with which 6 is below 448."""
ROWS_AT_ONCE = 1024
"""Rows that are packed at a time: bounds the memory that this takes."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight in float8_e4m3fn, with a scale for each row."""

    values: Tensor
    """float8_e4m3fn [outputs, inputs], contiguous."""
    scales: Tensor
    """float32 [outputs]."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs] = (code - zero point) · scale, with 32 / bits codes of a row in a word.

    Codes are integers, or floats of 8 or 4 bits (E4M3 or E2M1), which have no zero points.

    Words are in blocks of `plane` words, all of one group: code j of word t of a block, from its lowest bits on, belongs to input
    j · plane + t of the block.
    """

    words: Tensor
    """int32 [outputs, inputs·bits/32]."""
    scales: Tensor
    """[outputs, groups], in any float dtype."""
    zeros: Tensor | None
    """uint8 [outputs, groups]; None: the middle of the codes."""
    bits: int
    plane: int
    floats: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.words.shape
        return outputs, width * WORD_BITS // self.bits

    @classmethod
    def of(
        cls, words: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, *, floats: bool = False
    ) -> PackedWeight | None:
        """Reorder words of codes of consecutive inputs, the lowest bits first; None if no plane divides a group."""
        group = words.shape[1] // scales.shape[1]
        plane = next((plane for plane in PLANES if group % plane == 0), None)
        if plane is None:
            return None
        reordered = torch.empty_like(words)
        for target, source in zip(torch.split(reordered, ROWS_AT_ONCE), torch.split(words, ROWS_AT_ONCE), strict=True):
            blocks = _codes(source, bits).view(len(source), -1, WORD_BITS // bits, plane)
            # No two codes of a word have a bit in common.
            joined = (blocks << _shifts(bits, words.device).view(-1, 1)).sum(2, dtype=torch.int32)
            target.copy_(joined.view(len(source), -1))
        scales = scales.clone(memory_format=torch.contiguous_format)
        return cls(reordered, scales, zeros, bits, plane, floats)


@dataclass(frozen=True, slots=True)
class ExpertPanels:
    """Weights of experts [experts, outputs, inputs] in MXFP4, in the order in which expert_panels.py reads them.

    A panel has 64 inputs, two groups of 32. Byte permutations take the magnitudes of four codes from the low or the high half of a
    word: word t of a panel has codes 4t … 4t + 3 of the first group in its low half, and those of the second in its high half, without
    their signs. Those of the first group are the highest bits of its bytes, those of the second the highest bits of their low halves.
    """

    codes: Tensor
    """uint8 [experts, panels, outputs, 32]."""
    scales: Tensor
    """int32 [experts, pairs of panels, outputs]: the shifts of four groups, 4 bits each, then the exponent of all four, 8 bits.

    A group's scale is 2^(exponent + shift - 133), which is 12 in the group with the largest scale and at least 1 in others.
    """

    @classmethod
    def of(cls, words: Tensor, scales: Tensor) -> ExpertPanels | None:
        """Reorder codes of E2M1, int32 [experts, outputs, inputs/8], lowest bits first, with scales in E8M0 [experts, outputs, groups].

        None if scales of neighbouring groups differ by more than 2^11, for which E4M3 has no exponents.
        """
        experts, outputs, width = words.shape
        panels = -(-width // 8)
        codes = torch.empty(experts, panels, outputs, 32, dtype=torch.uint8, device=words.device)
        packed_scales = torch.empty(experts, -(-panels // 2), outputs, dtype=torch.int32, device=words.device)
        for expert in range(experts):
            own = functional.pad(words[expert], (0, 8 * panels - width)).view(outputs, panels, 8)
            exponents = scales[expert].view(torch.uint8).int()
            exponents = functional.pad(exponents, (0, 4 * packed_scales.shape[1] - exponents.shape[1]))
            exponents = exponents.view(outputs, -1, 4)
            largest = exponents.amax(-1, keepdim=True)
            shifts = exponents - largest + MAX_SHIFT
            has_values = (own.view(outputs, panels, 2, 4) & 0x77777777).any(-1).flatten(1)
            has_values = functional.pad(has_values, (0, 4 * packed_scales.shape[1] - 2 * panels)).view_as(shifts)
            if bool(((shifts < 1) & has_values).any()):
                return None
            shifts = (shifts.clamp(min=1) << _shifts(4, words.device)[:4]).sum(-1, dtype=torch.int32)
            packed_scales[expert] = (shifts | (largest[..., 0] - 6).clamp(min=0) << 16).t()
            halves = torch.stack((own & 0xFFFF, own >> 16 & 0xFFFF), -1).view(outputs, panels, 2, 8)
            first, second = halves.unbind(2)
            target = (first | second << 16) & 0x77777777
            for code in range(4):
                target |= (first >> 4 * code + 3 & 1) << 8 * code + 7 | (second >> 4 * code + 3 & 1) << 8 * code + 3
            codes[expert] = target.view(torch.uint8).view(outputs, panels, 32).transpose(0, 1)
        return cls(codes, packed_scales)


MatvecWeight = Tensor | Fp8Weight | PackedWeight
"""A weight [outputs, inputs] of a product with a few rows."""


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return int32 [rows, words, 32 / bits]."""
    return (words.unsqueeze(2) >> _shifts(bits, words.device)) & ((1 << bits) - 1)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, WORD_BITS, bits, device=device, dtype=torch.int32)
