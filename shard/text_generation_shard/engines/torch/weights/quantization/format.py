"""The interface of a format of quantized weights: the tensors that stand for a weight, and their dequantization."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDE = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights without quantization, and of most scales."""


class UnsupportedSchemeError(ValueError):
    """A config or a tensor asks for what is not supported; the message is one line, also if it quotes values."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that stands for a part of a weight."""

    names: tuple[str, ...]
    """Possible names in the checkpoint; the first that exists counts."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes that it may have."""
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False


class WeightFormat(ABC):
    """A format of quantized weights. A weight is [outputs, inputs] unless the format says otherwise."""

    __slots__ = ()

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name for logs, for example GPTQ int4 g128."""

    @abstractmethod
    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """Return the tensors that stand for the weight `name` of `shape`. Raises UnsupportedSchemeError for other shapes."""

    def check(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:  # noqa: B027 – most take all values
        """Raise UnsupportedSchemeError for values that the weight cannot be computed from; shapes and dtypes are right."""

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, Tensor], ranges: Sequence[slice]) -> Tensor:
        """Return the ranges of a weight, one of each dimension, in the dtype in which the format defines it."""


def sibling(name: str, suffix: str) -> str:
    """Return the name of a tensor of the same module: `sibling("a.weight", "qweight")` is a.qweight."""
    return f"{name.rpartition('.')[0]}.{suffix}"


def two_dimensions(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the outputs and inputs of a weight."""
    if len(shape) != 2:
        raise UnsupportedSchemeError(f"{name} has {len(shape)} dimensions, quantized weights have two")
    return shape[0], shape[1]


def groups_of(length: int, size: int) -> int:
    """Return the number of groups of `size` values that hold `length` values; -1: one group."""
    return 1 if size == -1 else -(-length // size)


def group_index(columns: slice, size: int) -> Tensor:
    """Return the group of each of the columns."""
    index = torch.arange(columns.start, columns.stop)
    return torch.zeros_like(index) if size == -1 else index // size
