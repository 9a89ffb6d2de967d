"""`Ops` on a CPU: products with weights packed for oneDNN, in the dtype of the model, and updates in place."""

from __future__ import annotations

from torch import Tensor

from text_generation_shard.engines.torch.kernels.operands import ACTIVATIONS
from text_generation_shard.engines.torch.layers import recurrence
from text_generation_shard.engines.torch.layers.adapted_linear import LoopedRows
from text_generation_shard.engines.torch.layers.expert_linear import choose_top_k, experts_by_loop
from text_generation_shard.engines.torch.layers.linear import Linear
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.layers.ops import ResidualStream
from text_generation_shard.engines.torch.parallel.group import ParallelGroup


class CpuOps:
    """Implements `Ops` for a rank of `group`, on any device."""

    has_buffers = False
    adapter_rows = LoopedRows
    route = staticmethod(choose_top_k)
    experts = staticmethod(experts_by_loop)
    convolve = staticmethod(recurrence.convolve)
    scan = staticmethod(recurrence.scan)
    gated_norm = staticmethod(recurrence.gated_norm)

    def __init__(self, group: ParallelGroup) -> None:
        self._group = group

    def norm(self, stream: ResidualStream, norm: RMSNorm | None, out: Tensor | None = None) -> Tensor:
        return stream.residual if norm is None else norm(stream.residual)

    def norm_rows(self, x: Tensor, norm: RMSNorm) -> None:
        x.copy_(norm(x))

    def norm_linear(
        self, stream: ResidualStream, norm: RMSNorm | None, linear: Linear, out: Tensor | None = None
    ) -> Tensor:
        return linear(self.norm(stream, norm))

    def norm_linear_activate(self, stream: ResidualStream, norm: RMSNorm | None, gate_up: Linear, kind: str) -> Tensor:
        gate, up = gate_up(self.norm(stream, norm)).chunk(2, dim=-1)
        return ACTIVATIONS[kind](gate).mul_(up)

    def add_linear(self, stream: ResidualStream, x: Tensor, linear: Linear, norm: RMSNorm | None = None) -> None:
        self.add(stream, linear(x), norm)

    def add_few_experts(self, *_: object) -> bool:
        return False

    def add(self, stream: ResidualStream, update: Tensor, norm: RMSNorm | None = None) -> None:
        self._group.all_reduce(update)
        stream.residual.add_(update if norm is None else norm(update), alpha=stream.scale)

    def multiply(self, stream: ResidualStream, factor: float) -> None:
        stream.residual.mul_(factor)

    def add_sum(
        self, stream: ResidualStream, parts: tuple[Tensor, Tensor], norms: tuple[RMSNorm, RMSNorm], norm: RMSNorm
    ) -> None:
        for part in parts:
            self._group.all_reduce(part)
        stream.residual.add_(norm(norms[0](parts[0]) + norms[1](parts[1])), alpha=stream.scale)
