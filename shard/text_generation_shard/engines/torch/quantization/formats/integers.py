"""Arithmetic that the integer formats share: w = (q − z) · s in the dtype of the scale, with z and s of a group of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from text_generation_shard.engines.torch.quantization.format import UnsupportedSchemeError

WORD_BITS = 32


def dequantized(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Return the weight [rows, columns] from codes [rows, columns], zeros and scales [rows, groups], and the columns' groups.

    The result has the dtype of the scales, in which codes and zeros are exact.
    """
    return (codes - zeros.index_select(1, groups)).to(scales.dtype) * scales.index_select(1, groups)


def middle(bits: int, scales: Tensor) -> Tensor:
    """Return the zero points of symmetric weights, of the shape of the scales."""
    return torch.full_like(scales, 1 << (bits - 1), dtype=torch.int16)


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words of 32 / bits codes each, the lowest bits first, along `dim`; int16, codes from 0 to 2^bits − 1."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    shifts = shifts.view(-1, *(1,) * (words.ndim - 1 - dim))
    codes = (words.unsqueeze(dim + 1) >> shifts).bitwise_and_((1 << bits) - 1)
    return codes.to(torch.int16).flatten(dim, dim + 1)


def unpacked_range(words: Tensor, bits: int, dim: int, part: slice) -> Tensor:
    """Unpack only the codes of a range along `dim`."""
    per_word = WORD_BITS // bits
    first, last = part.start // per_word, -(-part.stop // per_word)
    codes = unpacked(words.narrow(dim, first, last - first), bits, dim)
    return codes.narrow(dim, part.start - first * per_word, part.stop - part.start)


def check_bits(method: str, bits: object) -> int:
    """Return the number of bits if it is supported."""
    if bits not in (4, 8) or isinstance(bits, bool):
        raise UnsupportedSchemeError(f"{method}: weights of {bits} bits are not supported, only of 4 and 8")
    assert isinstance(bits, int)
    return bits


def check_group_size(method: str, size: object) -> int:
    """Return the size of a group if it is a positive multiple of 8, or -1."""
    if not isinstance(size, int) or isinstance(size, bool) or (size != -1 and (size < 8 or size % 8)):
        raise UnsupportedSchemeError(
            f"{method}: group_size {str(size)[:50]} is not supported, only -1 and multiples of 8"
        )
    return size


def packed(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Pack codes [rows, columns] along `dim` into int32 words: the inverse of `unpacked`."""
    per_word = WORD_BITS // bits
    rows, columns = codes.shape
    places = codes.reshape((rows // per_word, per_word, columns) if dim == 0 else (rows, columns // per_word, per_word))
    words = torch.zeros_like(places.select(dim + 1, 0), dtype=torch.int32)
    for place in range(per_word):
        words |= places.select(dim + 1, place).int() << (bits * place)
    return words
