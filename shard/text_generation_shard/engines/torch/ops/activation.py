"""The activations of MLPs, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """act(gate) · up. Called, it computes in the dtype of its input; the kernels fuse it into the product before it."""

    kind: str
    """"silu", "gelu", "gelu_pytorch_tanh", or "clamped_swiglu": (up + 1) · gate · sigmoid(alpha · gate), of gpt-oss."""
    interleaved: bool = False
    """True: gate and up alternate, gate first. False: all of gate comes first."""
    alpha: float = 1.702
    limit: float = 7.0
    """Clamps up on both sides and gate from above, for "clamped_swiglu" alone."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        if self.kind != "clamped_swiglu":
            return ACTIVATIONS[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)
