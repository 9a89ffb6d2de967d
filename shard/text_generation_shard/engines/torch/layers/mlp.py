"""The MLP of a layer: the part between its attention and the next layer."""

from typing import Protocol

import torch
from torch import Tensor

from text_generation_shard.engines.torch.layers.adapted_linear import AdaptedLinear
from text_generation_shard.engines.torch.layers.linear import Linear, ParallelLinear
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.layers.ops import Ops, ResidualStream
from text_generation_shard.engines.torch.layers.quantized.choice import QuantizedLinear
from text_generation_shard.engines.torch.weights.parameter import ParameterShard


class LayerMLP(Protocol):
    """The part of a layer after its attention."""

    def add(self, ops: Ops, stream: ResidualStream, before: RMSNorm | None, after: RMSNorm | None) -> None:
        """Add the MLP of the stream, normed by `before`, to the stream. `after` norms the sum over the ranks."""


class GatedMLP:
    """down(act(gate(x)) · up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self._activation = activation

    def inner(self, ops: Ops, stream: ResidualStream, before: RMSNorm | None) -> Tensor:
        """Return the input of `down`, [tokens, inner]."""
        return ops.norm_linear_activate(stream, before, self.gate_up, self._activation)

    def add(self, ops: Ops, stream: ResidualStream, before: RMSNorm | None, after: RMSNorm | None) -> None:
        ops.add_linear(stream, self.inner(ops, stream, before), self.down, after)


class DenseMLP(GatedMLP):
    """A gated MLP whose weights come from a checkpoint."""

    gate_up: ParallelLinear | QuantizedLinear | AdaptedLinear
    down: ParallelLinear | QuantizedLinear | AdaptedLinear

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        return {**self.gate_up.named_parameters(), **self.down.named_parameters()}

    def process_weights_after_loading(self) -> None:
        self.gate_up.process_weights_after_loading()
        self.down.process_weights_after_loading()

    def multiply(self, gate: float, down: float) -> None:
        """Multiply the loaded weights of the gates and of the outputs, which are not quantized."""
        assert isinstance(self.gate_up, ParallelLinear)
        assert isinstance(self.down, ParallelLinear)
        self.gate_up.weight[: len(self.gate_up.weight) // 2].mul_(gate)
        self.down.weight.mul_(down)

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()


class PlainMLP(DenseMLP):
    """down(max(up(x), 0)²), without a gate; `dtype` is that of the model."""

    def __init__(self, up: Linear, down: Linear, dtype: torch.dtype) -> None:
        super().__init__(up, down, "relu2")
        self._dtype = dtype

    def inner(self, ops: Ops, stream: ResidualStream, before: RMSNorm | None) -> Tensor:
        return ops.norm_linear(stream, before, self.gate_up).relu_().square_().to(self._dtype)
