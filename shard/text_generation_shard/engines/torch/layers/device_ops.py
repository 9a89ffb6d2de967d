"""`Ops` by kernels, on a GPU.

For a few tokens, each product is one kernel with the operations before and after it. For more tokens products are those of
cuBLAS, and an output is added to the residual stream by the kernel of the norm that reads it next.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.operands import GatedActivation, Routing, few_weights
from text_generation_shard.engines.torch.kernels.packed_weight import MatvecWeight
from text_generation_shard.engines.torch.layers.adapted_linear import AdaptedLinear
from text_generation_shard.engines.torch.layers.expert_linear import ExpertLinear
from text_generation_shard.engines.torch.layers.linear import Linear
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.layers.ops import Ops, ResidualStream
from text_generation_shard.engines.torch.parallel.group import ParallelGroup

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.kernels.device_kernels import DeviceKernels


class DeviceOps(Ops):
    """Implements `Ops` for a rank of `group`. `dtype` is that of the model: see `Precision`."""

    has_buffers = True

    def __init__(self, kernels: "DeviceKernels", group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__(group)
        self._kernels = kernels
        self._dtype = dtype
        self.adapter_rows = kernels.adapter_rows
        self.route = kernels.route
        self.experts = kernels.experts
        self.convolve = kernels.convolve
        self.scan = kernels.scan
        self.gated_norm = kernels.gated_norm

    def norm(self, stream: ResidualStream, norm: RMSNorm | None, out: Tensor | None = None) -> Tensor:
        if out is None:
            assert stream.normed is not None
            out = stream.normed
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        update_weight = None
        # The kernel has one epsilon: those of the norms of a model are equal, or there is one norm.
        if stream.update_norm is not None:
            update_weight, eps = stream.update_norm.weight, stream.update_norm.eps
        self._kernels.rms_norm(
            stream.residual, weight, eps, out, stream.update, update_weight, stream.scale, stream.factor
        )
        stream.update = stream.update_norm = None
        stream.factor = 1.0
        return out

    def norm_rows(self, x: Tensor, norm: RMSNorm) -> None:
        self._kernels.rms_norm(x, norm.weight, norm.eps, x)

    def norm_linear(
        self, stream: ResidualStream, norm: RMSNorm | None, linear: Linear, out: Tensor | None = None
    ) -> Tensor:
        weight = self._fused_weight(linear, stream)
        if out is None or weight is None or norm is None:
            return linear(self.norm(stream, norm), out)
        self._kernels.matvec(stream.residual, weight, out, linear.bias, norm=(norm.weight, norm.eps))
        return out

    def norm_linear_activate(self, stream: ResidualStream, norm: RMSNorm | None, gate_up: Linear, kind: str) -> Tensor:
        if norm is not None and (weight := self._fused_weight(gate_up, stream)) is not None:
            inner = self._inner(stream, weight.shape[0])
            self._kernels.matvec(
                stream.residual,
                weight,
                inner,
                gate_up.bias,
                norm=(norm.weight, norm.eps),
                activation=GatedActivation(kind),
            )
        elif isinstance(gate_up, AdaptedLinear) and gate_up.is_changed:
            inner = self._inner(stream, gate_up.outputs)
            gate_up.activate(self.norm(stream, norm), kind, inner)
        else:
            product = gate_up(self.norm(stream, norm))
            inner = self._inner(stream, product.shape[1])
            self._kernels.activate(product, GatedActivation(kind), inner)
        return inner

    def add_linear(self, stream: ResidualStream, x: Tensor, linear: Linear, norm: RMSNorm | None = None) -> None:
        weight = self._fused_weight(linear, stream)
        if norm is not None or weight is None:
            # A part of the update in the stream is not normed, scaled or summed over the ranks.
            is_plain = norm is None and stream.scale == self._group.tp.world_size == 1
            if is_plain and isinstance(linear, AdaptedLinear) and linear.is_changed:
                update = linear.update(x, stream.residual)
            else:
                update = linear(x)
            self.add(stream, update, norm)
            return
        # The residual stream itself is part of rank 0's summand.
        is_first = self._group.tp.rank == 0
        self._kernels.matvec(x, weight, stream.residual, linear.bias, add=is_first, scale=stream.scale)
        self._group.all_reduce(stream.residual)

    def add_few_experts(
        self,
        stream: ResidualStream,
        before: RMSNorm,
        router: Linear,
        experts: tuple[ExpertLinear, ExpertLinear, GatedActivation],
        routing: Routing,
    ) -> bool:
        gate_up, down, activation = experts
        weight = self._fused_weight(router, stream)
        few = few_weights(gate_up, down, routing.each * len(stream.residual))
        if weight is None or few is None:
            return False
        residual, x = stream.residual, stream.normed
        assert x is not None
        logits = torch.empty(len(x), weight.shape[0], dtype=torch.float32, device=x.device)
        norm = before.weight, before.eps
        # The experts read the normed rows: to norm them in each of their programs takes longer.
        self._kernels.matvec(residual, weight, logits, norm=norm, normed=x)
        ids, weights = self.route(logits[:, : len(gate_up.weight)], routing)
        self._kernels.few_experts(
            x,
            ids,
            weights,
            gate_up,
            down,
            activation,
            few,
            out=residual,
            add=self._group.tp.rank == 0,  # as in add_linear
            scale=stream.scale,
        )
        self._group.all_reduce(residual)
        return True

    def add(self, stream: ResidualStream, update: Tensor, norm: RMSNorm | None = None) -> None:
        self._group.all_reduce(update)
        stream.update, stream.update_norm = update, norm

    def multiply(self, stream: ResidualStream, factor: float) -> None:
        if stream.update is None:
            stream.residual.mul_(factor)
        else:
            stream.factor *= factor

    def add_sum(
        self, stream: ResidualStream, parts: tuple[Tensor, Tensor], norms: tuple[RMSNorm, RMSNorm], norm: RMSNorm
    ) -> None:
        for part in parts:
            self._group.all_reduce(part)
        total, update = torch.empty_like(stream.residual), torch.empty_like(stream.residual)
        self._kernels.rms_norm(parts[0], norms[0].weight, norms[0].eps, total)
        self._kernels.rms_norm(total, norm.weight, norm.eps, update, parts[1], norms[1].weight)
        stream.update, stream.update_norm = update, None

    def _inner(self, stream: ResidualStream, gate_up_width: int) -> Tensor:
        """Allocate the inner values of an MLP."""
        shape = len(stream.residual), gate_up_width // 2
        return torch.empty(shape, dtype=self._dtype, device=stream.residual.device)

    def _fused_weight(self, linear: Linear, stream: ResidualStream) -> MatvecWeight | None:
        """Return the weight of a product that is computed by one kernel with the operations next to it, None for others."""
        few = len(stream.residual) <= self._kernels.fused_tokens
        return linear.matvec_weight if few and stream.update is None else None
