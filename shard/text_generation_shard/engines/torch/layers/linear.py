"""y = x·Wᵀ + b, for the part of a projection that one rank computes.

Nothing here waits for the device, so that everything can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.packed_weight import MatvecWeight
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange
from text_generation_shard.engines.torch.weights.parameter import ParameterShard

TYPICAL_ROWS = 16
"""Rows of x that oneDNN optimizes the weight layout for; measured, 1 to 512 give the same layout and speed."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection of the checkpoint, and this rank's ranges of its outputs and inputs."""

    name: str
    outputs: ShardRange
    inputs: ShardRange
    part: str = ""
    """Distinguishes several ranges of the outputs of one projection."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs.total, self.inputs.total

    @property
    def starts(self) -> tuple[int, int]:
        return self.outputs.start, self.inputs.start

    @property
    def is_whole(self) -> bool:
        """True if the rank has all outputs and inputs."""
        return self.outputs.length == self.outputs.total and self.inputs.length == self.inputs.total

    def names(self, kind: str) -> tuple[str, str]:
        """Return the names of a parameter: that of the model, and that of its tensor in the checkpoint."""
        return f"{self.name}{self.part}.{kind}", f"{self.name}.{kind}"


class Linear(Protocol):
    """y = x·Wᵀ + b, for the part of a projection that one rank computes."""

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def matvec_weight(self) -> MatvecWeight | None:
        """The weight for products with a few rows that are fused with the operations next to them; None if it has none."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return y [rows, outputs] for x [rows, inputs], written to `out` if given."""

    def pack(self) -> None:
        """Reorder the loaded weight for products on a CPU, without `out`; the weight can be used for nothing else."""


class DenseLinear:
    """A weight [outputs, inputs] and an optional bias [outputs]; the output dtype is that of the weight, or float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, products: torch.dtype) -> None:
        self.weight = weight
        self.bias = bias
        self._products = products
        self._packed = False

    @property
    def matvec_weight(self) -> Tensor:
        return self.weight

    def pack(self) -> None:
        """Reorder the weight for oneDNN, which else does so at every call. torch has no public operators for it."""
        if _packs(self.weight):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, TYPICAL_ROWS)
            self._packed = True

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return y [rows, outputs] for x [rows, inputs] in the dtype of the weight, written to `out` if given."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        if self._products != self.weight.dtype:
            y = float32_product(x, self.weight, out)
            return y if self.bias is None else y.add_(self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


class ParallelLinear(DenseLinear):
    """Fused projections with the same input. The output dtype is `precision.products`."""

    def __init__(
        self, projections: Sequence[Projection], device: torch.device, precision: Precision, *, bias: bool
    ) -> None:
        self.projections = tuple(projections)
        rows = sum(projection.outputs.length for projection in projections)
        weight = torch.empty(rows, projections[0].inputs.length, device=device, dtype=precision.model)
        super().__init__(weight, weight.new_empty(rows) if bias else None, precision.products)

    def named_parameters(self) -> dict[str, ParameterShard]:
        weights = fused_parameters(self.projections, "weight", self.weight)
        return weights | fused_parameters(self.projections, "bias", self.bias)

    def process_weights_after_loading(self, order: Tensor | None = None) -> None:
        """Prepare the loaded weights for use. Output i becomes the loaded output `order[i]`."""
        if order is not None:
            for tensor in (self.weight, self.bias):
                if tensor is not None:
                    tensor.copy_(tensor[order.to(tensor.device)])


def has_products(dtype: torch.dtype) -> bool:
    """Return True if oneDNN has products of this data type for the CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packs(weight: Tensor) -> bool:
    is_reordered = weight.dtype in (torch.bfloat16, torch.float32)
    return weight.device.type == "cpu" and is_reordered and has_products(weight.dtype)


def float32_product(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """Return x · weightᵀ in float32 for x and weight of one dtype, written to `out` if given."""
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return torch.mm(x.float(), weight.float().t(), out=out)
    if out is None:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)


def fused_parameters(projections: Sequence[Projection], kind: str, fused: Tensor | None) -> dict[str, ParameterShard]:
    """Return the rows of a fused weight or bias under the checkpoint names of its projections."""
    if fused is None:
        return {}
    dims = fused.ndim
    parameters = {}
    for each, rows in zip(projections, fused_rows(projections, fused), strict=True):
        key, name = each.names(kind)
        parameters[key] = ParameterShard(rows, each.shape[:dims], each.starts[:dims], name)
    return parameters


def fused_rows(projections: Sequence[Projection], fused: Tensor) -> tuple[Tensor, ...]:
    return torch.split(fused, [projection.outputs.length for projection in projections])
