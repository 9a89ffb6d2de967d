"""The operations of a decoder: those of the layers (`Ops`), and the kernels that they launch on a GPU (`Kernels`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from text_generation_shard.engines.torch.cuda.step_plan import StepPlan
from text_generation_shard.engines.torch.kernels.packed_weight import PackedWeight
from text_generation_shard.engines.torch.model.linear import Linear
from text_generation_shard.engines.torch.model.norm import RMSNorm
from text_generation_shard.engines.torch.ops.activation import GatedActivation
from text_generation_shard.engines.torch.ops.experts import ExpertLinear

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.kernels.step import DecodeStep, RopeStep


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

    def norm(self, stream: ResidualStream, norm: RMSNorm, out: Tensor | None = None) -> Tensor:
        """Return the normed stream [tokens, hidden]."""
        ...

    def norm_linear(self, stream: ResidualStream, norm: RMSNorm, linear: Linear, out: Tensor | None = None) -> Tensor:
        """Return the product of the normed stream: [tokens, outputs]."""
        ...

    def norm_linear_activate(self, stream: ResidualStream, norm: RMSNorm, gate_up: Linear, kind: str) -> Tensor:
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

    def route(
        self, logits: Tensor, experts_each: int, *, normalize: bool, expert_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the ids and the weights of the experts of each token: see `softmax_top_k`."""
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

    def add(self, stream: ResidualStream, update: Tensor, norm: RMSNorm | None = None) -> None:
        """Add `update` [tokens, hidden], summed over the ranks, then normed, then scaled, to the stream."""


class Kernels(Protocol):
    """See the kernels of the same names for shapes. Everything called in a forward pass can be captured in a CUDA graph,
    except `chunk_attention`, which is planned on the host for each step."""

    fused_tokens: int
    """Up to this number of tokens in a step, fused products are faster than separate ones."""

    def update_tables(self, cells: Tensor, blocks: Tensor, tables: Tensor) -> None: ...

    def embed(
        self, ids: Tensor, slots: Tensor, last_tokens: Tensor, table: Tensor, residual: Tensor, scale: float
    ) -> None: ...

    def rms_norm(self, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...

    def add_rms_norm(  # noqa: PLR0913 – as flat as the kernel
        self,
        update: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        update_weight: Tensor | None,
        scale: float,
        factor: float,
    ) -> None: ...

    def rotate_and_append(
        self,
        qkv: Tensor,
        queries: Tensor,
        step: RopeStep,
        cache_layer: Tensor,
        head_norms: tuple[Tensor, Tensor] | None,
    ) -> None: ...

    def append(
        self, keys: Tensor, values: Tensor, cache_layer: Tensor, positions: Tensor, slots: Tensor, block_tables: Tensor
    ) -> None: ...

    def activate(self, gate_up: Tensor, kind: str, out: Tensor) -> None: ...

    def norm_matvec(
        self,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor | PackedWeight,
        out: Tensor,
        bias: Tensor | None,
    ) -> None: ...

    def norm_matvec_activate(
        self,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor | PackedWeight,
        kind: str,
        out: Tensor,
        bias: Tensor | None,
    ) -> None: ...

    def matvec(
        self, x: Tensor, weight: Tensor | PackedWeight, out: Tensor, bias: Tensor | None, scale: float
    ) -> None: ...

    def matvec_add(
        self, x: Tensor, weight: Tensor | PackedWeight, residual: Tensor, bias: Tensor | None, scale: float
    ) -> None: ...

    def route(
        self, logits: Tensor, experts_each: int, *, normalize: bool, expert_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: GatedActivation,
    ) -> Tensor: ...

    def decode_attention(
        self,
        queries: Tensor,
        cache_layer: Tensor,
        step: DecodeStep,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None: ...

    def plan_chunks(self, plan: StepPlan, columns: Mapping[str, Tensor]) -> None:
        """Plan `chunk_attention` for the chunks of a step; `columns` are those of the plan on the device."""

    def chunk_attention(
        self, queries: Tensor, cache_layer: Tensor, window: int | None, out: Tensor, sinks: Tensor | None
    ) -> None:
        """out = softmax(q·kᵀ·scale)·v for the tokens of the chunks; `queries` [tokens, heads, head_dim], `out` flattened."""

    def sample_greedy(
        self, logits: Tensor, slots: Tensor, last_tokens: Tensor, token_ids: Tensor, logprobs: Tensor
    ) -> None: ...
