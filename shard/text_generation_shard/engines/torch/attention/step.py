"""The protocol of a step: its tokens, and their attention. A CPU step attends by an `AttentionPlan`, a device step by kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, dtype

from text_generation_shard.engines.torch.batch.state_rows import StateRows
from text_generation_shard.engines.torch.layers.norm import HeadNorms
from text_generation_shard.engines.torch.layers.rope import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class ScoreRules:
    """The rules by which a layer turns queries and keys into weights: softmax(scale · q·kᵀ), changed as below."""

    scale: float
    softcap: float | None = None
    """If given, scores s become softcap · tanh(s / softcap)."""
    sinks: Tensor | None = None
    """[heads]: scores of keys without values."""


StateMix = Callable[[StateRows, Tensor, Tensor | None], Tensor]
"""Computes tokens from their projections [tokens, …] and the states of their sequences, in an output if one is given."""


@dataclass(frozen=True, slots=True)
class StepImages:
    """The images in the tokens of a step."""

    places: Tensor | None
    """int64 [rows]: the tokens whose embeddings the images give; None without."""
    rows: Tensor | None
    """[levels, rows, hidden]: the embeddings, then what is added to the hidden states after each of the first layers."""
    positions: Tensor | None
    """int64 [3, tokens]: the rotary positions in each axis; None if they are those of a text."""
    ahead: Tensor | None = None
    """int32 [tokens]: the number of later tokens of its image that a token attends to in layers with `bidirectional_images`."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.places, self.rows, self.positions, self.ahead

    @property
    def levels(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    def embed(self, embedded: Tensor) -> Tensor:
        """Put the embeddings of the images into those of the tokens."""
        self.put(embedded, 0, Tensor.index_copy_)
        return embedded

    def add(self, residual: Tensor, layer: int) -> None:
        """Add the rows of the images that follow a layer."""
        self.put(residual, layer + 1, Tensor.index_add_)

    def put(self, hidden: Tensor, level: int, operation: Callable[[Tensor, int, Tensor, Tensor], Tensor]) -> None:
        """Change hidden states by an operation on the rows of a level, if there are any."""
        if self.rows is not None and self.places is not None and level < len(self.rows):
            operation(hidden, 0, self.places, self.rows[level].to(hidden.dtype))

    def in_order(self, places: Tensor) -> "StepImages":
        """Return the same for tokens in another order; `places` are their indices in this one."""
        inverse = torch.empty_like(places).index_copy_(0, places, torch.arange(len(places)))
        return StepImages(
            None if self.places is None else inverse[self.places],
            self.rows,
            None if self.positions is None else self.positions[:, places],
            None if self.ahead is None else self.ahead[places],
        )


class Step(Protocol):
    """The tokens of a step in flat order, and their attention over the paged KV cache.

    Methods with an `out` write their result to it if it is given, and return it.
    """

    positions: Tensor
    """[tokens], an integer type."""
    rotary_positions: Tensor
    """The positions of `rotated`: [tokens] or [axes, tokens]."""
    adapters: Tensor | None = None
    """int32 [tokens]: the LoRA adapter of each token, from 1 on; 0 for none. None if no token has one."""
    images: "StepImages | None" = None
    carried: Tensor | None = None
    """Set by a model: what `Model.predict` reads of its pass, if not its output."""

    @cached_property
    def _factors(self) -> dict[tuple[RotaryEmbedding, dtype], tuple[Tensor, Tensor]]:
        """The factors of the rotations of the tokens."""
        return {}

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    def token_ids(self) -> Tensor:
        """Return the token ids, int64 [tokens]."""

    @property
    def state_rows(self) -> StateRows:
        """The tokens by sequence, for layers with a state."""

    def embed(self, table: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        """Return the rows of `table` [vocabulary, hidden] of the tokens, times `scale`; those of images are to be put there."""

    def with_states(self, mix: StateMix, projected: Tensor, out: Tensor | None = None) -> Tensor:
        """Return mix(rows, projected, out) for the sequences of the step."""
        return mix(self.state_rows, projected, out)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [KV heads, tokens, dim], filled with zeros up to head_dim, to the cache of a layer.

        In a layer with latent attention the keys are the rows [1, tokens, head_dim], and the values are not read.
        """

    def rotated(self, heads: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """Return the rotated `heads` [tokens, heads, width], which it may overwrite."""
        key = rotary, heads.dtype
        if (factors := self._factors.get(key)) is None:
            factors = self._factors[key] = rotary.factors(self.rotary_positions, heads.dtype)
        rotary.rotate(heads, factors)
        return heads

    def rotate_and_append(
        self,
        layer: int,
        qkv: Tensor,
        rotary: RotaryEmbedding,
        head_norms: HeadNorms | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the rotated queries [tokens, heads, head_dim]; append rotated keys, and values.

        `qkv` [tokens, (heads + 2 · KV heads) · head_dim] has query heads, key heads and value heads; it may be overwritten.
        Without value heads, values are the keys before their norm and rotation.
        """

    def attend(self, layer: int, queries: Tensor, rules: ScoreRules, out: Tensor | None = None) -> Tensor:
        """Return the attention over the cache of a layer, [tokens, heads · value_dim].

        `queries` is [tokens, heads, head_dim]; the tokens' keys and values have been appended.
        """
