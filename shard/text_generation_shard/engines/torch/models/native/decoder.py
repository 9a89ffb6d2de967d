"""The forward pass of a decoder, shaped by its config, for all devices.

Computes the same as transformers' LlamaDecoderLayer and its variants, on a flat batch of tokens. The query, key and value
projections are fused into one product, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.attention.step import ScoreRules, Step
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.layers.linear import DenseLinear, Linear
from text_generation_shard.engines.torch.layers.mlp import GatedMLP, LayerMLP
from text_generation_shard.engines.torch.layers.norm import HeadNorms, RMSNorm
from text_generation_shard.engines.torch.layers.ops import Ops, ResidualStream
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.layers.rope import RotaryEmbedding
from text_generation_shard.engines.torch.models.native.config import DecoderNumbers
from text_generation_shard.engines.torch.parallel.group import ParallelGroup


@dataclass(eq=False, kw_only=True)
class DecoderLayer:
    """The weights of a layer that the forward pass reads."""

    shape: LayerShape
    """The attention of this rank."""
    qkv: Linear
    qkv_width: int
    """Outputs of `qkv`."""
    output: Linear
    input_norm: RMSNorm
    mlp_norm: RMSNorm
    after_attention: RMSNorm | None
    """The norm of the output of attention, before it is added to the residual stream."""
    after_mlp: RMSNorm | None
    head_norms: HeadNorms | None
    sinks: Tensor | None
    """Scores of keys without values, one for each query head."""
    mlp: LayerMLP
    scale: float = 1.0
    """Factor of the residual stream after the layer."""


@dataclass(eq=False, kw_only=True)
class DecoderWeights:
    """The weights of one rank that the forward pass reads."""

    embedding: Tensor
    layers: Sequence[DecoderLayer]
    rotary: Sequence[RotaryEmbedding]
    """The rotation of each layer."""
    norm: RMSNorm
    head: DenseLinear
    """This rank's rows of the LM head; the weight may be a view of the embedding."""
    precision: Precision

    def convert(self) -> None:
        """Convert weights of products with normed hidden states to the final precision: see `Precision.after_loading`."""
        norms = [self.norm, *(norm for layer in self.layers for norm in (layer.input_norm, layer.mlp_norm))]
        mlps = [layer.mlp.gate_up for layer in self.layers if isinstance(layer.mlp, GatedMLP)]
        after_norms = [self.head, *(layer.qkv for layer in self.layers), *mlps]
        self.precision = self.precision.after_loading(norms, after_norms)


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

    def __init__(self, config: DecoderNumbers, weights: DecoderWeights, ops: Ops, group: ParallelGroup) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._group = group
        self._device = weights.embedding.device
        if ops.has_buffers:
            for each in weights.rotary:
                each.fill_table(config.max_sequence_length)
        self._rules = [
            ScoreRules(config.attention_scale, config.attention_softcap, layer.sinks) for layer in weights.layers
        ]
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
            attended = step.attend(index, queries, self._rules[index], own.attended)
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
