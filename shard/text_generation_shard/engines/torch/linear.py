"""y = x·Wᵀ + b on a CPU, with the weight reordered once for the fastest kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

TYPICAL_ROWS = 16
"""Rows of x that oneDNN optimizes the weight layout for; measured, 1 to 512 give the same layout and speed."""


class CpuLinear:
    """A weight [outputs, inputs] and an optional bias [outputs]. Load the weight, process it, then call."""

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
