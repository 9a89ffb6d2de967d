"""The MLP of a layer: the part between its attention and the next layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from text_generation_shard.engines.torch.model.linear import Linear, ParallelLinear
from text_generation_shard.engines.torch.model.norm import RMSNorm
from text_generation_shard.engines.torch.ops.interface import Ops, ResidualStream
from text_generation_shard.engines.torch.parameter import ParameterShard
from text_generation_shard.engines.torch.quantization.layers import QuantizedLinear


class MLP(Protocol):
    """Weights of one layer's MLP, and its computation. A dense MLP, or a mixture of experts."""

    @property
    def projections(self) -> Sequence[ParallelLinear | QuantizedLinear]:
        """The fused projections."""
        ...

    @property
    def after_norm(self) -> Sequence[ParallelLinear | QuantizedLinear]:
        """The projections that are multiplied with normed hidden states."""
        ...

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        """Return the tensors to fill, by checkpoint name."""
        ...

    def process_weights_after_loading(self) -> None:
        """Prepare the loaded weights for use."""

    def pack(self) -> None:
        """Reorder the loaded weights for products on a CPU: see `Linear.pack`."""

    def add(self, ops: Ops, stream: ResidualStream, before: RMSNorm, after: RMSNorm | None) -> None:
        """Add the MLP of the stream, normed by `before`, to the stream. `after` norms the sum over the ranks."""


class GatedMLP:
    """down(act(gate(x)) · up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self._projections = gate_up, down
        self._activation = activation

    def inner(self, ops: Ops, stream: ResidualStream, before: RMSNorm) -> Tensor:
        """Return the input of `down`, [tokens, inner]."""
        return ops.norm_linear_activate(stream, before, self._projections[0], self._activation)

    def add(self, ops: Ops, stream: ResidualStream, before: RMSNorm, after: RMSNorm | None) -> None:
        ops.add_linear(stream, self.inner(ops, stream, before), self._projections[1], after)


class DenseMLP(GatedMLP):
    """A gated MLP whose weights come from a checkpoint."""

    def __init__(
        self, gate_up: ParallelLinear | QuantizedLinear, down: ParallelLinear | QuantizedLinear, activation: str
    ) -> None:
        super().__init__(gate_up, down, activation)
        self.gate_up = gate_up
        self.down = down

    @property
    def projections(self) -> Sequence[ParallelLinear | QuantizedLinear]:
        return self.gate_up, self.down

    @property
    def after_norm(self) -> Sequence[ParallelLinear | QuantizedLinear]:
        return (self.gate_up,)

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        return {**self.gate_up.named_parameters(), **self.down.named_parameters()}

    def process_weights_after_loading(self) -> None:
        for linear in self.projections:
            linear.process_weights_after_loading()

    def pack(self) -> None:
        for linear in self.projections:
            linear.pack()
