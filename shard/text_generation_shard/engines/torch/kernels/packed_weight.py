"""Quantized weights as the products of a few rows read them: in FP8, and packed integers in an order of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BITS = 32
PLANES = (16, 8, 4)
"""Words of a block: the most that divide a group are used, so that x is read in the longest pieces."""
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


MatvecWeight = Tensor | Fp8Weight | PackedWeight
"""A weight [outputs, inputs] of a product with a few rows."""


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return int32 [rows, words, 32 / bits]."""
    return (words.unsqueeze(2) >> _shifts(bits, words.device)) & ((1 << bits) - 1)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, WORD_BITS, bits, device=device, dtype=torch.int32)
