"""`Ops` on a CPU: products with weights packed for oneDNN, in the dtype of the model, and updates in place."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.model.linear import Linear
from text_generation_shard.engines.torch.model.norm import RMSNorm
from text_generation_shard.engines.torch.ops.activation import ACTIVATIONS
from text_generation_shard.engines.torch.ops.interface import ResidualStream


class CpuOps:
    """Implements `Ops` for a single rank."""

    has_buffers = False

    def norm(self, stream: ResidualStream, norm: RMSNorm, out: Tensor | None = None) -> Tensor:
        return functional.rms_norm(stream.residual, norm.weight.shape, norm.weight, norm.eps)

    def norm_linear(self, stream: ResidualStream, norm: RMSNorm, linear: Linear, out: Tensor | None = None) -> Tensor:
        return linear(self.norm(stream, norm))

    def norm_linear_activate(self, stream: ResidualStream, norm: RMSNorm, gate_up: Linear, kind: str) -> Tensor:
        gate, up = gate_up(self.norm(stream, norm)).chunk(2, dim=-1)
        return ACTIVATIONS[kind](gate).mul_(up)

    def add_linear(self, stream: ResidualStream, x: Tensor, linear: Linear) -> None:
        self.add(stream, linear(x))

    def add(self, stream: ResidualStream, update: Tensor) -> None:
        stream.residual += update
