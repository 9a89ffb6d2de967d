"""The operations of a layer besides attention: in plain torch, with updates in place. `DeviceOps` has them for a GPU."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from text_generation_shard.engines.torch.kernels.operands import ACTIVATIONS, GatedActivation, Routing
from text_generation_shard.engines.torch.layers import recurrence
from text_generation_shard.engines.torch.layers.adapted_linear import AdapterRows, LoopedRows
from text_generation_shard.engines.torch.layers.expert_linear import ExpertLinear, choose_top_k, experts_by_loop
from text_generation_shard.engines.torch.layers.linear import Linear
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.parallel.group import ParallelGroup


@dataclass(slots=True)
class ResidualStream:
    """The sum of the outputs of all layers so far; every layer reads its norm and adds to it."""

    residual: Tensor
    """[tokens, hidden]; on a GPU float32: rounding it to bfloat16 after each layer alone would cost as much precision as all
    products together."""
    normed: Tensor | None = None
    """Buffer [tokens, hidden] for normed hidden states; None: each norm allocates its own."""
    update: Tensor | None = None
    """An output that is still to be added: the norm that reads the stream next adds it, in the same kernel."""
    update_norm: RMSNorm | None = None
    scale: float = 1.0
    """Factor of all updates."""
    factor: float = 1.0
    """Factor of the stream that is still to be applied after the update."""


class Ops:
    """The operations for a rank of `group`, on any device. Those with an `out` may write their result to it, and return it."""

    has_buffers = False
    """True if results that pass from one piece of a CUDA graph to another have to be in given buffers."""
    adapter_rows: Callable[[Tensor, int], AdapterRows] = LoopedRows
    """Returns the tokens of a step by adapter, for indices [tokens], 0 for none, and the number of adapters."""
    route = staticmethod(choose_top_k)
    experts = staticmethod(experts_by_loop)
    convolve = staticmethod(recurrence.convolve)
    scan = staticmethod(recurrence.scan)
    gated_norm = staticmethod(recurrence.gated_norm)

    def __init__(self, group: ParallelGroup) -> None:
        self._group = group

    def norm(self, stream: ResidualStream, norm: RMSNorm | None, out: Tensor | None = None) -> Tensor:
        """Return the normed stream [tokens, hidden]; the stream as it is without a norm."""
        return stream.residual if norm is None else norm(stream.residual)

    def norm_rows(self, x: Tensor, norm: RMSNorm) -> None:
        """Norm the rows of `x` in place."""
        x.copy_(norm(x))

    def norm_linear(
        self, stream: ResidualStream, norm: RMSNorm | None, linear: Linear, out: Tensor | None = None
    ) -> Tensor:
        """Return the product of the normed stream: [tokens, outputs]."""
        return linear(self.norm(stream, norm))

    def norm_linear_activate(self, stream: ResidualStream, norm: RMSNorm | None, gate_up: Linear, kind: str) -> Tensor:
        """Return act(gate) · up of the product of the normed stream: [tokens, outputs / 2]."""
        gate, up = gate_up(self.norm(stream, norm)).chunk(2, dim=-1)
        return ACTIVATIONS[kind](gate).mul_(up)

    def add_linear(self, stream: ResidualStream, x: Tensor, linear: Linear, norm: RMSNorm | None = None) -> None:
        """Add the product of `x` [tokens, inputs] to the stream, as `add` does."""
        self.add(stream, linear(x), norm)

    def add_few_experts(
        self,
        stream: ResidualStream,
        before: RMSNorm,
        router: Linear,
        experts: tuple[ExpertLinear, ExpertLinear, GatedActivation],
        routing: Routing,
    ) -> bool:
        """Add the outputs of the experts (gate and up, down, activation) of a few tokens to the stream by kernels that are fused.

        `router` returns float32. Router and experts read the stream normed by `before`. False: nothing was done.
        """
        return False

    def add(self, stream: ResidualStream, update: Tensor, norm: RMSNorm | None = None) -> None:
        """Add `update` [tokens, hidden], summed over the ranks, then normed, then scaled, to the stream."""
        self._group.all_reduce(update)
        stream.residual.add_(update if norm is None else norm(update), alpha=stream.scale)

    def multiply(self, stream: ResidualStream, factor: float) -> None:
        """Multiply the stream with `factor`, after the last update."""
        stream.residual.mul_(factor)

    def add_sum(
        self, stream: ResidualStream, parts: tuple[Tensor, Tensor], norms: tuple[RMSNorm, RMSNorm], norm: RMSNorm
    ) -> None:
        """Add norm(norms[0](parts[0]) + norms[1](parts[1])) to the stream; the parts are first summed over the ranks."""
        for part in parts:
            self._group.all_reduce(part)
        stream.residual.add_(norm(norms[0](parts[0]) + norms[1](parts[1])), alpha=stream.scale)
