"""y = x·Wᵀ + b on a GPU, for the part of a projection that one rank computes.

Nothing here waits for the device: all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.cuda.precision import Precision
from text_generation_shard.engines.torch.weights import Part


@dataclass(frozen=True, slots=True)
class Span:
    """`length` of the `total` rows or columns of a checkpoint's tensor, from `start` on."""

    start: int
    length: int
    total: int

    @classmethod
    def whole(cls, total: int) -> Span:
        return cls(0, total, total)


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection as the checkpoint names it, and which of its outputs and inputs are this rank's."""

    name: str
    outputs: Span
    inputs: Span

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole weight."""
        return self.outputs.total, self.inputs.total

    @property
    def starts(self) -> tuple[int, int]:
        return self.outputs.start, self.inputs.start


class Linear:
    """Projections of the same inputs, fused: a weight [outputs, inputs], maybe a bias [outputs].

    Outputs are of the dtype of `precision.products`: the weight's, or float32.
    """

    def __init__(
        self, projections: Sequence[Projection], device: torch.device, precision: Precision, *, bias: bool
    ) -> None:
        self.projections = tuple(projections)
        self._products, dtype = precision.products, precision.model
        rows = sum(projection.outputs.length for projection in projections)
        self.weight = torch.empty(rows, projections[0].inputs.length, device=device, dtype=dtype)
        self.bias = torch.empty(rows, device=device, dtype=dtype) if bias else None

    def targets(self) -> dict[str, Part]:
        return weight_targets(self.projections, self.weight) | bias_targets(self.projections, self.bias)

    def seal(self) -> None:
        """Ready the loaded weight for use: it is, as it lies."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """y [rows, outputs] for x [rows, inputs] of the weight's dtype, in `out` if that is given."""
        if self._products != self.weight.dtype:
            y = float32_product(x, self.weight, out)
            return y if self.bias is None else y.add_(self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


class Head:
    """The rows of the vocabulary that are this rank's: `weight` [rows, hidden], which may be the embedding's."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 logits [tokens, rows] for x [tokens, hidden], summed in float32 and never rounded to less."""
        return float32_product(x, self.weight, out)


def float32_product(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """x · weightᵀ for x and weight in one dtype, summed in float32 and left so; in `out` if that is given."""
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return torch.mm(x.float(), weight.float().t(), out=out)
    if out is None:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)


def weight_targets(projections: Sequence[Projection], weight: Tensor) -> dict[str, Part]:
    """The rows of a fused weight, under the names of the projections that it was fused from."""
    return {
        f"{projection.name}.weight": Part(rows, projection.shape, projection.starts)
        for projection, rows in zip(projections, fused_rows(projections, weight), strict=True)
    }


def bias_targets(projections: Sequence[Projection], bias: Tensor | None) -> dict[str, Part]:
    if bias is None:
        return {}
    return {
        f"{projection.name}.bias": Part(rows, projection.shape[:1], projection.starts[:1])
        for projection, rows in zip(projections, fused_rows(projections, bias), strict=True)
    }


def fused_rows(projections: Sequence[Projection], fused: Tensor) -> tuple[Tensor, ...]:
    """Views of the rows of each projection."""
    return torch.split(fused, [projection.outputs.length for projection in projections])
