"""Builds the linear layers of a layer of a checkpoint, or one rank's part of them."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from text_generation_shard.engines.torch.layers.adapted_linear import AdaptedLinear
from text_generation_shard.engines.torch.layers.linear import ParallelLinear, Projection
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.layers.quantized.choice import QuantizedLinear, quantized_linear
from text_generation_shard.engines.torch.models.native.adapters import ModelAdapters
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange, TensorParallelRank
from text_generation_shard.engines.torch.weights.quantization.schemes import Scheme

AnyLinear = ParallelLinear | QuantizedLinear | AdaptedLinear


class LayerProjections:
    """The projections of a layer, whose names in the checkpoint begin with `prefix`."""

    def __init__(  # noqa: PLR0913 – all that its linear layers need
        self,
        prefix: str,
        hidden_size: int,
        scheme: Scheme | None,
        tp: TensorParallelRank,
        device: torch.device,
        precision: Precision,
        adapters: ModelAdapters | None = None,
        inputs: int = 0,
    ) -> None:
        """`inputs` of `of_hidden`; 0: hidden_size."""
        self.prefix, self.tp, self.device, self.precision = prefix, tp, device, precision
        self.hidden, self._inputs = ShardRange.whole(hidden_size), ShardRange.whole(inputs or hidden_size)
        self.scheme = scheme
        self._adapters = adapters

    def of_hidden(self, parts: Sequence[tuple[str, ShardRange]], fused: str | None = None, *, bias: bool) -> AnyLinear:
        """Return the projections of the hidden states with the given outputs; `fused` names the one that has all their rows."""
        return self.linear(self.projections(parts, fused), bias=bias)

    def to_hidden(self, name: str, inputs: ShardRange, *, bias: bool) -> AnyLinear:
        """Return a projection to the hidden states."""
        # The outputs of the ranks are summed, so only one rank adds the bias.
        projection = Projection(f"{self.prefix}{name}", self.hidden, inputs)
        return self.linear([projection], bias=bias and self.tp.rank == 0)

    def projections(self, parts: Sequence[tuple[str, ShardRange]], fused: str | None = None) -> list[Projection]:
        """Return the projections of `of_hidden`."""
        if fused is None:
            return [Projection(f"{self.prefix}{name}", rows, self._inputs) for name, rows in parts]
        name, total = f"{self.prefix}{fused}", sum(rows.total for _, rows in parts)
        if self.tp.world_size == 1:
            return [Projection(name, ShardRange.whole(total), self.hidden)]
        ends = accumulate(rows.total for _, rows in parts)
        return [
            Projection(name, ShardRange(end - rows.total + rows.start, rows.length, total), self.hidden, f".{part}")
            for part, ((_, rows), end) in enumerate(zip(parts, ends, strict=True))
        ]

    def linear(self, projections: Sequence[Projection], *, bias: bool) -> AnyLinear:
        """Return projections of one input as one linear layer, in their packed format if there are products with it."""
        packed = quantized_linear(projections, self.scheme, self.device, self.precision.model, bias=bias)
        linear = packed or ParallelLinear(projections, self.device, self.precision, bias=bias)
        return linear if self._adapters is None else self._adapters.adapt(linear, projections, self.device)


def of_heads(heads: ShardRange, head_dim: int) -> ShardRange:
    """Return the range of the values of some heads."""
    return ShardRange(heads.start * head_dim, heads.length * head_dim, heads.total * head_dim)
