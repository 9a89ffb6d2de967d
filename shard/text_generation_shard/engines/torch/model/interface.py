"""The protocols between executors and models: a model runs steps, a step gives its tokens and their attention.

The native decoder and Hugging Face modules are models. A CPU step attends by an `AttentionPlan`, a device step by kernels.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Step(Protocol):
    """The tokens of a step in flat order, and their attention over the paged KV cache."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def positions(self) -> Tensor:
        """[tokens], an integer type."""
        ...

    def token_ids(self) -> Tensor:
        """Return the token ids, int64 [tokens]."""
        ...

    def append(self, layer: int, keys_values: Tensor) -> None:
        """Write keys and values [tokens, 2 · KV heads, head_dim], keys first, to the cache of a layer."""

    def attend(
        self,
        layer: int,
        queries: Tensor,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return softmax(scale · q·kᵀ)·v over the cache of a layer, [tokens, heads · head_dim], in `out` if given.

        `queries` is [tokens, heads, head_dim]; the tokens' keys and values have been appended. With a `softcap` c the scores s
        become c·tanh(s / c). `sinks` [heads] are scores of keys without values.
        """
        ...


class Model(Protocol):
    """A model that an executor runs, with the weights of one rank."""

    def forward(self, step: Step) -> Tensor:
        """Return hidden states [tokens, hidden], as `logits` expects them; writes keys and values to the cache."""
        ...

    def logits(self, hidden: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return logits [rows, vocabulary] for some rows of hidden states; the same on every rank.

        Written to the first rows of `memory` if given: see `logits_memory`.
        """
        ...

    def logits_memory(self, rows: int) -> Tensor:
        """Allocate a buffer for the logits of `rows` rows."""
        ...
