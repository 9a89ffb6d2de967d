"""AWQ in AutoAWQ's `gemm` layout (Lin et al. 2023, arXiv 2306.00978).

Codes and zero points are packed along the outputs: `qweight` int32 [inputs, outputs·bits/32], `qzeros` int32
[groups, outputs·bits/32]; `scales` [groups, outputs]. Within a word, the codes of eight outputs are in the order ORDER.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from text_generation_shard.engines.torch.weights.quantization.format import (
    WIDE,
    StoredTensor,
    UnsupportedSchemeError,
    groups_of,
    sibling,
    two_dimensions,
)
from text_generation_shard.engines.torch.weights.quantization.formats.integers import (
    WORD_BITS,
    GroupedIntegers,
    check_group_size,
    middle,
    unpacked,
)

BITS = 4
PER_WORD = WORD_BITS // BITS
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of the code of each of eight outputs."""
LAYOUT = "gemm"


@dataclass(frozen=True, slots=True)
class AwqFormat(GroupedIntegers):
    @property
    def label(self) -> str:
        return f"AWQ int{BITS} g{self.group_size}"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        outputs, inputs = two_dimensions(name, shape)
        if outputs % PER_WORD:
            raise UnsupportedSchemeError(f"{name} has {outputs} outputs: AWQ packs multiples of {PER_WORD}")
        groups = groups_of(inputs, self.group_size)
        words = (torch.int32,)
        stored = {
            "qweight": StoredTensor((sibling(name, "qweight"),), ((inputs, outputs // PER_WORD),), words),
            "scales": StoredTensor((sibling(name, "scales"),), ((groups, outputs),), WIDE),
        }
        if not self.symmetric:
            shapes = ((groups, outputs // PER_WORD),)
            stored["qzeros"] = StoredTensor((sibling(name, "qzeros"),), shapes, words)
        return stored

    def codes(self, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:
        return _codes_of(tensors["qweight"][columns], rows).t()

    def zeros(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        if self.symmetric:
            return middle(BITS, self.scales(tensors, rows))
        return _codes_of(tensors["qzeros"], rows).t()

    def scales(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        return tensors["scales"][:, rows].t()


def _codes_of(words: Tensor, outputs: slice) -> Tensor:
    """Return the codes of a range of the outputs, in their order, from words [n, outputs / 8]."""
    first, last = outputs.start // PER_WORD, -(-outputs.stop // PER_WORD)
    codes = unpacked(words[:, first:last], BITS, 1)
    codes = codes.view(len(words), -1, PER_WORD)[..., list(ORDER)].flatten(1)
    return codes[:, outputs.start - first * PER_WORD :][:, : outputs.stop - outputs.start]


def read_awq(given: Mapping[str, Any]) -> AwqFormat:
    for key in ("version", "format", "checkpoint_format"):
        layout = given.get(key) or LAYOUT
        if str(layout).lower() != LAYOUT:
            raise UnsupportedSchemeError(f"awq: {key} {str(layout)[:50]} is not supported, only {LAYOUT}")
    bits = given.get("bits", given.get("w_bit", BITS))
    if bits != BITS:
        raise UnsupportedSchemeError(f"awq: weights of {str(bits)[:50]} bits are not supported, only of {BITS}")
    size = given.get("group_size", given.get("q_group_size", 128))
    zero_point = given.get("zero_point", True)
    if not isinstance(zero_point, bool):
        raise UnsupportedSchemeError("awq: zero_point is not true or false")
    return AwqFormat(BITS, check_group_size("awq", size), symmetric=not zero_point)
