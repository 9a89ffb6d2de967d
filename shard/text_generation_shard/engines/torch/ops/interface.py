"""The operations of a forward pass besides matrix products: on a GPU, our Triton kernels and FlashInfer's attention.

The reference implementation runs on a CPU; tests compare the kernels with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from text_generation_shard.engines.torch.cuda.step_plan import StepPlan

if TYPE_CHECKING:
    from text_generation_shard.engines.torch.kernels.decode_attention import DecodeStep
    from text_generation_shard.engines.torch.kernels.rope import RopeStep


class Ops(Protocol):
    """See the kernels of the same names for shapes. Everything called in a forward pass can be captured in a CUDA graph,
    except `chunk_attention`, which is planned on the host for each step."""

    fused_tokens: int
    """Up to this number of tokens in a step, fused products are faster than separate ones."""

    def update_tables(self, cells: Tensor, blocks: Tensor, tables: Tensor) -> None: ...

    def embed(self, ids: Tensor, slots: Tensor, last_tokens: Tensor, table: Tensor, residual: Tensor) -> None: ...

    def rms_norm(self, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...

    def add_rms_norm(self, update: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...

    def rotate_and_append(
        self,
        qkv: Tensor,
        queries: Tensor,
        step: RopeStep,
        cache_layer: Tensor,
        head_norms: tuple[Tensor, Tensor] | None,
    ) -> None: ...

    def activate(self, gate_up: Tensor, kind: str, out: Tensor) -> None: ...

    def norm_matvec(
        self, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, out: Tensor, bias: Tensor | None
    ) -> None: ...

    def norm_matvec_activate(
        self,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        kind: str,
        out: Tensor,
        bias: Tensor | None,
    ) -> None: ...

    def matvec(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> None: ...

    def matvec_add(self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> None: ...

    def decode_attention(
        self, queries: Tensor, cache_layer: Tensor, step: DecodeStep, window: int | None, out: Tensor
    ) -> None: ...

    def plan_chunks(self, plan: StepPlan, pages: Tensor) -> None:
        """Plan `chunk_attention` for the chunks of a step; `pages` is the plan's column on the device."""

    def chunk_attention(self, queries: Tensor, cache_layer: Tensor, window: int | None, out: Tensor) -> None:
        """out = softmax(q·kᵀ·scale)·v for the tokens of the chunks; `queries` [tokens, heads, head_dim], `out` flattened."""

    def sample_greedy(
        self, logits: Tensor, slots: Tensor, last_tokens: Tensor, token_ids: Tensor, logprobs: Tensor
    ) -> None: ...
