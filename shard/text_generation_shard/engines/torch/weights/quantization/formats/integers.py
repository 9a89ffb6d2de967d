"""Arithmetic that the integer formats share: w = (q − z) · s in the dtype of the scale, with z and s of a group of inputs."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.weights.quantization.format import (
    UnsupportedSchemeError,
    WeightFormat,
    group_index,
)

WORD_BITS = 32
MAX_GROUP_SIZE = 1 << 20
"""Inputs; the limit of the inner size of a model."""


@dataclass(frozen=True, slots=True)
class GroupedIntegers(WeightFormat):
    """A format with codes, and with a scale and a zero point for each output and group of inputs."""

    bits: int
    group_size: int
    """Inputs per group; -1: all."""
    symmetric: bool
    """True: all zero points are the middle of the codes."""
    desc_act: bool = False
    """True: the groups of the inputs are not in order."""

    @abstractmethod
    def codes(self, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:
        """Return unsigned codes [rows, columns]."""

    @abstractmethod
    def zeros(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Return zero points [rows, groups]."""

    @abstractmethod
    def scales(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Return scales [rows, groups]."""

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return the group of each input; None if they are in order."""
        return None

    def dequantize(self, tensors: Mapping[str, Tensor], ranges: Sequence[slice]) -> Tensor:
        rows, columns = ranges
        order = self.order(tensors)
        return dequantized(
            self.codes(tensors, rows, columns),
            self.zeros(tensors, rows),
            self.scales(tensors, rows),
            group_index(columns, self.group_size) if order is None else order[columns],
        )


def dequantized(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Return the weight [rows, columns] from codes [rows, columns], zeros and scales [rows, groups], and the columns' groups.

    The result is rounded to the dtype of the scales. The product is computed in float32, where that of an integer and a scale of
    16 bits is exact, so that the bits are those of a product in the dtype of the scales.
    """
    runs, lengths = torch.unique_consecutive(groups, return_counts=True)
    if not (lengths == lengths[0]).all():
        runs, lengths = groups, torch.ones(1, dtype=torch.int64)
    values = codes.view(codes.shape[0], len(runs), int(lengths[0])).float()
    values -= zeros.index_select(1, runs).unsqueeze(2)
    values *= scales.index_select(1, runs).unsqueeze(2)
    return values.to(scales.dtype).view(codes.shape)


def middle(bits: int, scales: Tensor) -> Tensor:
    """Return the zero points of symmetric weights, of the shape of the scales."""
    return torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words of 32 / bits codes each, the lowest bits first, along `dim`; uint8."""
    # A copy: a dimension of one element may have any stride, which a view of other bytes does not accept.
    copy = words.clone(memory_format=torch.contiguous_format)
    codes = copy.view(torch.uint8).view(*words.shape, WORD_BITS // 8)
    if bits == 4:
        codes = torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2)
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


def unpacked_range(words: Tensor, bits: int, dim: int, part: slice) -> Tensor:
    """Unpack only the codes of a range along `dim`."""
    per_word = WORD_BITS // bits
    first, last = part.start // per_word, -(-part.stop // per_word)
    codes = unpacked(words.narrow(dim, first, last - first), bits, dim)
    return codes.narrow(dim, part.start - first * per_word, part.stop - part.start)


def check_bits(method: str, bits: object) -> int:
    """Return the number of bits if it is supported."""
    if not isinstance(bits, int) or bits not in (4, 8):
        raise UnsupportedSchemeError(f"{method}: weights of {repr(bits)[:50]} bits are not supported, only of 4 and 8")
    return bits


def check_group_size(method: str, size: object) -> int:
    """Return the size of a group if it is a positive multiple of 8, or -1."""
    if type(size) is not int or (size != -1 and (not 8 <= size <= MAX_GROUP_SIZE or size % 8)):
        raise UnsupportedSchemeError(
            f"{method}: group_size {str(size)[:50]} is not supported, only -1 and multiples of 8"
        )
    return size


def packed(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Pack codes [rows, columns] along `dim` into int32 words: the inverse of `unpacked`."""
    codes = codes.to(torch.uint8).movedim(dim, -1)
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes.flatten().view(torch.int32).view(*codes.shape[:-1], -1).movedim(-1, dim)
