"""The forward pass of a decoder, shaped by its config, for all devices.

Computes the same as transformers' LlamaDecoderLayer and its variants, on a flat batch of tokens. The query, key and value
projections are fused into one product, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from text_generation_shard.engines.torch.attention.shape import LayerShape
from text_generation_shard.engines.torch.model.interface import Step
from text_generation_shard.engines.torch.model.linear import DenseLinear, Linear
from text_generation_shard.engines.torch.model.norm import HeadNorms, RMSNorm
from text_generation_shard.engines.torch.model.precision import Precision
from text_generation_shard.engines.torch.model.rope import RotaryEmbedding
from text_generation_shard.engines.torch.ops.interface import Ops, ResidualStream
from text_generation_shard.engines.torch.parallel.group import ParallelGroup


class DecoderConfig(Protocol):
    """The numbers of a decoder that its forward pass reads: see `ModelConfig`."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_sequence_length(self) -> int: ...
    @property
    def attention_scale(self) -> float: ...
    @property
    def attention_softcap(self) -> float | None: ...
    @property
    def embedding_scale(self) -> float: ...
    @property
    def residual_scale(self) -> float: ...
    @property
    def logits_divisor(self) -> float: ...
    @property
    def final_softcap(self) -> float | None: ...


class LayerMLP(Protocol):
    """The part of a layer after its attention."""

    def add(self, ops: Ops, stream: ResidualStream, before: RMSNorm, after: RMSNorm | None) -> None:
        """Add the output for the stream, normed by `before`, to the stream; `after` norms the output."""


class DecoderLayer(Protocol):
    """The weights of a layer: see `LayerWeights`."""

    @property
    def shape(self) -> LayerShape: ...
    @property
    def qkv_width(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def input_norm(self) -> RMSNorm: ...
    @property
    def qkv(self) -> Linear: ...
    @property
    def head_norms(self) -> HeadNorms | None: ...
    @property
    def sinks(self) -> Tensor | None: ...
    @property
    def output(self) -> Linear: ...
    @property
    def after_attention(self) -> RMSNorm | None: ...
    @property
    def mlp_norm(self) -> RMSNorm: ...
    @property
    def mlp(self) -> LayerMLP: ...
    @property
    def after_mlp(self) -> RMSNorm | None: ...


class DecoderWeights(Protocol):
    """The weights of one rank: see `ModelWeights`."""

    @property
    def embedding(self) -> Tensor: ...
    @property
    def layers(self) -> Sequence[DecoderLayer]: ...
    @property
    def rotary(self) -> Sequence[RotaryEmbedding]:
        """The rotation of each layer."""
        ...

    @property
    def norm(self) -> RMSNorm: ...
    @property
    def head(self) -> DenseLinear: ...
    @property
    def precision(self) -> Precision: ...


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """Buffers around the attention of a layer; None where each result is a new tensor."""

    qkv: Tensor | None = None
    """[tokens, (num_heads + 2·num_kv_heads)·head_dim], or less if values are keys: output of the fused projection."""
    queries: Tensor | None = None
    """[tokens, num_heads, head_dim]: rotated queries; a view of `qkv` if both have the same dtype."""
    attended: Tensor | None = None
    """[tokens, num_heads·head_dim]: output of attention."""

    def first(self, tokens: int) -> AttentionBuffers:
        """Return views of the first `tokens` rows."""
        return AttentionBuffers(*(_first(buffer, tokens) for buffer in (self.qkv, self.queries, self.attended)))


@dataclass(frozen=True, slots=True)
class Activations:
    """Buffers of a forward pass that all layers use; None where each result is a new tensor."""

    residual: Tensor | None = None
    """float32 [tokens, hidden]."""
    normed: Tensor | None = None
    """[tokens, hidden]: at the end, the normed output of the last layer."""
    attention: Sequence[AttentionBuffers] = ()
    """For each layer, in the same memory; layers with the same heads have the same ones. Empty without buffers."""

    def of(self, layer: int) -> AttentionBuffers:
        """Return the buffers of a layer."""
        return self.attention[layer] if self.attention else AttentionBuffers()

    def first(self, tokens: int) -> Activations:
        """Return views of the first `tokens` rows."""
        views = {id(each): each.first(tokens) for each in self.attention}
        attention = [views[id(each)] for each in self.attention]
        return Activations(_first(self.residual, tokens), _first(self.normed, tokens), attention)


class Decoder:
    """Implements `Model` with the weights of one rank of `group`."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, ops: Ops, group: ParallelGroup) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._group = group
        self._device = weights.embedding.device
        if ops.has_buffers:
            for each in weights.rotary:
                each.fill_table(config.max_sequence_length)
        # Rounded to the dtype of the embedding, as in transformers.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype))

    def forward(self, step: Step, buffers: Activations | None = None) -> Tensor:
        """Return hidden states, as `Model.forward` does; in `buffers`, if given, where the operations need them."""
        config, weights, ops = self._config, self._weights, self._ops
        if buffers is None:
            buffers = self.activations(step.num_tokens)
        residual = step.embed(weights.embedding, self._embedding_scale, buffers.residual)
        stream = ResidualStream(residual, buffers.normed, scale=config.residual_scale)
        for index, layer in enumerate(weights.layers):
            own = buffers.of(index)
            qkv = ops.norm_linear(stream, layer.input_norm, layer.qkv, own.qkv)
            queries = step.rotate_and_append(index, qkv, weights.rotary[index], layer.head_norms, own.queries)
            attended = step.attend(
                index,
                queries,
                config.attention_scale,
                softcap=config.attention_softcap,
                sinks=layer.sinks,
                out=own.attended,
            )
            ops.add_linear(stream, attended, layer.output, layer.after_attention)
            layer.mlp.add(ops, stream, layer.mlp_norm, layer.after_mlp)
            if layer.scale != 1.0:
                ops.multiply(stream, layer.scale)
        return ops.norm(stream, weights.norm, buffers.normed)

    def cut_forward(self, max_tokens: int) -> Callable[[Step], Tensor]:
        buffers = self.activations(max_tokens)
        # Attention skips the padding rows, so any finite values do; later steps leave theirs.
        for own in buffers.attention:
            if own.attended is not None:
                own.attended.zero_()
        return lambda step: self.forward(step, buffers.first(step.num_tokens))

    def logits(self, hidden: Tensor, memory: Tensor | None = None) -> Tensor:
        head, size = self._weights.head, self._group.tp.world_size
        if size == 1:
            return self._capped(head(hidden, None if memory is None else memory[: len(hidden)]))
        if memory is None:
            memory = self.logits_memory(len(hidden))
        self._group.all_gather_last_dim(head(hidden), memory[: len(hidden)])
        return self._capped(memory[: len(hidden), : self._config.vocab_size])

    def logits_memory(self, rows: int) -> Tensor:
        width = self._group.tp.world_size * self._weights.head.weight.shape[0]
        return torch.empty(rows, width, dtype=torch.float32, device=self._device)

    def activations(self, tokens: int) -> Activations:
        """Allocate uninitialized buffers for a pass of `tokens` tokens, where the operations need them."""
        if not self._ops.has_buffers:
            return Activations()
        layers, hidden, precision = self._weights.layers, self._config.hidden_size, self._weights.precision

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(tokens, width, dtype=dtype, device=self._device)

        heads = [(layer.shape.num_heads, layer.shape.head_dim, layer.qkv_width) for layer in layers]
        widest = max(num_heads * head_dim for num_heads, head_dim, _ in heads)
        qkv, attended = empty(max(width for _, _, width in heads), precision.products), empty(widest, precision.model)
        rotated = None if qkv.dtype == precision.model else empty(widest, precision.model)
        buffers: dict[tuple[int, int, int], AttentionBuffers] = {}
        for num_heads, head_dim, width in dict.fromkeys(heads):
            own, queries = _narrowed(qkv, width), num_heads * head_dim
            buffers[num_heads, head_dim, width] = AttentionBuffers(
                own,
                (own[:, :queries] if rotated is None else _narrowed(rotated, queries)).view(tokens, -1, head_dim),
                _narrowed(attended, queries),
            )
        return Activations(
            residual=empty(hidden, torch.float32),
            normed=empty(hidden, precision.normed),
            attention=[buffers[each] for each in heads],
        )

    def _capped(self, logits: Tensor) -> Tensor:
        """Return the logits after the last operations of the model, in place."""
        config = self._config
        if config.logits_divisor != 1.0:
            logits.div_(config.logits_divisor)
        if config.final_softcap is not None:
            logits.div_(config.final_softcap).tanh_().mul_(config.final_softcap)
        return logits


def _first(buffer: Tensor | None, tokens: int) -> Tensor | None:
    return None if buffer is None else buffer[:tokens]


def _narrowed(buffer: Tensor, width: int) -> Tensor:
    """Return a contiguous [tokens, width] in the memory of `buffer` [tokens, at least width]."""
    return buffer.view(-1)[: len(buffer) * width].view(len(buffer), width)
