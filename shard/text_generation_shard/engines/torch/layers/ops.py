"""The operations of a layer besides attention, with an implementation for CPUs and one for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from text_generation_shard.engines.torch.batch.state_rows import StateRows
from text_generation_shard.engines.torch.kernels.operands import (
    Convolution,
    GatedActivation,
    GatedNorm,
    Recurrence,
    Routing,
)
from text_generation_shard.engines.torch.layers.adapted_linear import AdapterRows
from text_generation_shard.engines.torch.layers.expert_linear import ExpertLinear
from text_generation_shard.engines.torch.layers.linear import Linear
from text_generation_shard.engines.torch.layers.norm import RMSNorm


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
    """The norm of `update`, if it has one."""
    scale: float = 1.0
    """Factor of all updates."""
    factor: float = 1.0
    """Factor of the stream that is still to be applied after the update."""


class Ops(Protocol):
    """The operations of a layer besides attention. Methods with an `out` write their result to it if given, and return it."""

    has_buffers: bool
    """True if results that pass from one piece of a CUDA graph to another have to be in given buffers."""

    def adapter_rows(self, indices: Tensor, count: int) -> AdapterRows:
        """Return the tokens of a step by adapter; `indices` [tokens] are 0 for none, at most `count`."""
        ...

    def norm(self, stream: ResidualStream, norm: RMSNorm | None, out: Tensor | None = None) -> Tensor:
        """Return the normed stream [tokens, hidden]; the stream as it is without a norm."""
        ...

    def norm_rows(self, x: Tensor, norm: RMSNorm) -> None:
        """Norm the rows of `x` in place."""

    def norm_linear(
        self, stream: ResidualStream, norm: RMSNorm | None, linear: Linear, out: Tensor | None = None
    ) -> Tensor:
        """Return the product of the normed stream: [tokens, outputs]."""
        ...

    def norm_linear_activate(self, stream: ResidualStream, norm: RMSNorm | None, gate_up: Linear, kind: str) -> Tensor:
        """Return act(gate) · up of the product of the normed stream: [tokens, outputs / 2]."""
        ...

    def add_linear(self, stream: ResidualStream, x: Tensor, linear: Linear, norm: RMSNorm | None = None) -> None:
        """Add the product of `x` [tokens, inputs] to the stream, as `add` does."""

    def multiply(self, stream: ResidualStream, factor: float) -> None:
        """Multiply the stream with `factor`, after the last update."""

    def add_sum(
        self, stream: ResidualStream, parts: tuple[Tensor, Tensor], norms: tuple[RMSNorm, RMSNorm], norm: RMSNorm
    ) -> None:
        """Add norm(norms[0](parts[0]) + norms[1](parts[1])) to the stream; the parts are first summed over the ranks."""

    def route(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return the ids and the weights of the experts of each token: see `choose_top_k`."""
        ...

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: GatedActivation,
    ) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts: see `experts_by_loop`."""
        ...

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
        ...

    def convolve(self, x: Tensor, convolution: Convolution, states: Tensor, rows: StateRows) -> Tensor:
        """Return the convolved values [tokens, channels] of `x` [tokens, channels]; updates the states."""
        ...

    def scan(
        self,
        qkv: Tensor,
        steps: Tensor,
        betas: Tensor | None,
        recurrence: Recurrence,
        states: Tensor,
        drafted: Tensor,
        rows: StateRows,
    ) -> Tensor:
        """Return the outputs [tokens, heads · value_width] of a recurrence; updates the states: see `recurrence.scan`."""
        ...

    def gated_norm(self, x: Tensor, gate: Tensor, norm: GatedNorm, out: Tensor | None = None) -> Tensor:
        """Return the normed and gated values of `x` [tokens, columns]."""
        ...

    def add(self, stream: ResidualStream, update: Tensor, norm: RMSNorm | None = None) -> None:
        """Add `update` [tokens, hidden], summed over the ranks, then normed, then scaled, to the stream."""
