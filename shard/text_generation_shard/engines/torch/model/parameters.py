"""The weights of a decoder, or of one rank's part of it.

Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053): a rank has some of the heads and some columns of
the MLP, so each layer has two all-reduces. Norms and the embedding are replicated; the rows of the LM head are divided and the
logits gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.attention.shape import LayerShape
from text_generation_shard.engines.torch.model.config import ModelConfig
from text_generation_shard.engines.torch.model.experts import Experts, ExpertsBesideMLP
from text_generation_shard.engines.torch.model.linear import (
    DenseLinear,
    FusedProjection,
    ParallelLinear,
    Projection,
    ShardRange,
)
from text_generation_shard.engines.torch.model.mlp import MLP, DenseMLP
from text_generation_shard.engines.torch.model.norm import HeadNorms, RMSNorm
from text_generation_shard.engines.torch.model.precision import Precision
from text_generation_shard.engines.torch.model.rope import RotaryEmbedding, head_order
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.parameter import ParameterShard
from text_generation_shard.engines.torch.quantization.layers import QuantizedLinear, quantized_linear


class LayerWeights:
    """Weights of one layer: the projections `qkv` and `output` of its attention, its MLP, and its norms."""

    def __init__(
        self, config: ModelConfig, index: int, tp: TensorParallelRank, device: torch.device, precision: Precision
    ) -> None:
        self._prefix = f"model.layers.{index}."
        self._config, self._device, self._precision = config, device, precision
        hidden = ShardRange.whole(config.hidden_size)
        whole = config.layers[index]
        heads, kv_heads = tp.even(config.num_heads, "attention heads"), tp.kv_heads(whole.num_kv_heads)
        self.shape = replace(whole, num_heads=heads.length, num_kv_heads=kv_heads.length)
        """The attention of this rank."""
        queries, keys = _of_heads(heads, whole.head_dim), _of_heads(kv_heads, whole.head_dim)
        attention = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys)]
        if not config.values_are_keys or whole.window is not None:
            attention.append(("self_attn.v_proj", keys))
        self.qkv_width = sum(rows.length for _, rows in attention)
        fused = "self_attn.qkv_proj" if config.fused_qkv else None
        self._head_order = head_order(config.ropes[index], whole.head_dim)
        self.qkv = self._linear(
            self._projections(attention, fused, tp),
            bias=config.qkv_bias,
            quantized=self._head_order is None,  # rows of quantized weights cannot be reordered
        )
        # The outputs of the ranks are summed, so only one rank adds the bias.
        output = Projection(f"{self._prefix}self_attn.o_proj", hidden, queries)
        self.output = self._linear([output], bias=config.output_bias and tp.rank == 0)
        self.mlp = self._mlp(index, tp)
        self.sinks = torch.empty(heads.length, device=device, dtype=precision.model) if config.has_sinks else None
        """Scores of keys without values, one for each query head."""
        self._first_head = heads.start
        self._scalar = torch.empty(1, device=device, dtype=precision.model) if config.layer_scalars else None
        self.scale = 1.0
        """Factor of the residual stream after the layer."""
        names, hidden_size = config.norms, config.hidden_size
        self.input_norm, self.mlp_norm = self._norm(hidden_size), self._norm(hidden_size)
        self.after_attention = self._norm(hidden_size) if names.after_attention else None
        """The norm of the output of attention, before it is added to the residual stream."""
        self.after_mlp = self._norm(hidden_size) if names.after_mlp else None
        self.head_norms: HeadNorms | None = None
        if config.query_key_norm:
            query_norm, key_norm = self._norm(whole.head_dim), self._norm(whole.head_dim)
            self.head_norms = HeadNorms(query_norm, key_norm, values=config.value_norm)

    def _mlp(self, index: int, tp: TensorParallelRank) -> MLP:
        experts = self._config.experts
        if experts is None or not experts.layers[index]:
            return self._dense_mlp("mlp", self._config.intermediate_size, tp)
        if experts.family.beside_mlp:
            dense = self._dense_mlp("mlp", self._config.intermediate_size, tp)
            sparse = Experts(
                experts, self._config.hidden_size, self._prefix, tp, self._device, self._precision.model, None
            )
            return ExpertsBesideMLP(sparse, dense, self._prefix, self._norm, self._config.hidden_size)
        shared = self._dense_mlp("mlp.shared_expert", experts.shared_inner, tp) if experts.shared_inner else None
        return Experts(experts, self._config.hidden_size, self._prefix, tp, self._device, self._precision.model, shared)

    def _dense_mlp(self, name: str, inner_size: int, tp: TensorParallelRank) -> DenseMLP:
        config, hidden = self._config, ShardRange.whole(self._config.hidden_size)
        inner = tp.even(inner_size, "inner values of the MLP")
        gate_up = [(f"{name}.gate_proj", inner), (f"{name}.up_proj", inner)]
        fused = f"{name}.gate_up_proj" if config.fused_gate_up else None
        down = Projection(f"{self._prefix}{name}.down_proj", hidden, inner)
        return DenseMLP(
            self._linear(self._projections(gate_up, fused, tp), bias=config.mlp_bias),
            self._linear([down], bias=config.mlp_bias and tp.rank == 0),
            config.activation,
        )

    def _norm(self, width: int, factor: float = 1.0) -> RMSNorm:
        config, dtype = self._config, self._precision.model
        zero_centered = config.zero_centered_norms
        return RMSNorm(width, config.rms_norm_eps, self._device, dtype, zero_centered=zero_centered, factor=factor)

    @property
    def _norms(self) -> dict[str, RMSNorm]:
        """The norms of the residual stream and of the outputs, by name."""
        names = self._config.norms
        norms = {names.before_attention: self.input_norm, names.before_mlp: self.mlp_norm}
        if names.after_attention and self.after_attention:
            norms[names.after_attention] = self.after_attention
        if names.after_mlp and self.after_mlp:
            norms[names.after_mlp] = self.after_mlp
        return norms

    @property
    def linears(self) -> tuple[ParallelLinear | QuantizedLinear, ...]:
        """The projections, without experts."""
        return self.qkv, self.output, *self.mlp.projections

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        parameters: dict[str, ParameterShard | Tensor] = {
            f"{self._prefix}{name}.weight": norm.weight for name, norm in self._norms.items()
        }
        if self.head_norms is not None:
            parameters[f"{self._prefix}self_attn.q_norm.weight"] = self.head_norms.query.weight
            parameters[f"{self._prefix}self_attn.k_norm.weight"] = self.head_norms.key.weight
        if self.sinks is not None:
            parameters[f"{self._prefix}self_attn.sinks"] = ParameterShard(
                self.sinks, (self._config.num_heads,), (self._first_head,)
            )
        if self._scalar is not None:
            parameters[f"{self._prefix}layer_scalar"] = self._scalar
        for each in (self.qkv, self.output, self.mlp):
            parameters |= each.named_parameters()
        return parameters

    def process_weights_after_loading(self) -> None:
        for each in (self.qkv, self.output, self.mlp):
            each.process_weights_after_loading()
        for norm in self._norms.values():
            norm.process_weights_after_loading()
        if self.head_norms is not None:
            self.head_norms.process_weights_after_loading(
                self.shape.num_heads, self.shape.num_kv_heads, self._head_order
            )
        if self._scalar is not None:
            self.scale = float(self._scalar)
        if self._head_order is not None and isinstance(self.qkv, ParallelLinear):
            self._reorder_heads(self.qkv, self._head_order)

    def pack(self) -> None:
        """Reorder all weights for products on a CPU: see `Linear.pack`."""
        for each in (self.qkv, self.output, self.mlp):
            each.pack()

    def _reorder_heads(self, qkv: ParallelLinear, order: list[int]) -> None:
        """Reorder the dimensions of query and key heads: see `head_order`."""
        count, head_dim = self.shape.num_heads + self.shape.num_kv_heads, self.shape.head_dim
        for tensor in (qkv.weight, qkv.bias):
            if tensor is not None:
                heads = tensor[: count * head_dim].view(count, head_dim, *tensor.shape[1:])
                heads.copy_(heads[:, order].clone())

    def _projections(
        self, parts: Sequence[tuple[str, ShardRange]], fused: str | None, tp: TensorParallelRank
    ) -> list[Projection]:
        """Return projections of the hidden states with the given outputs; `fused` names the one that has all their rows."""
        hidden = ShardRange.whole(self._config.hidden_size)
        if fused is None:
            return [Projection(f"{self._prefix}{name}", rows, hidden) for name, rows in parts]
        whole = FusedProjection(f"{self._prefix}{fused}", sum(rows.total for _, rows in parts))
        if tp.world_size == 1:
            return [Projection(whole.name, ShardRange.whole(whole.rows), hidden)]
        ends = accumulate(rows.total for _, rows in parts)
        return [
            Projection(f"{self._prefix}{name}", rows, hidden, whole, end - rows.total)
            for (name, rows), end in zip(parts, ends, strict=True)
        ]

    def _linear(
        self, projections: Sequence[Projection], *, bias: bool, quantized: bool = True
    ) -> ParallelLinear | QuantizedLinear:
        scheme = self._config.quantization if quantized else None
        linear = quantized_linear(projections, scheme, self._device, self._precision.model, bias=bias)
        return linear or ParallelLinear(projections, self._device, self._precision, bias=bias)


class ModelWeights:
    """All weights of a rank. Created empty: fill `named_parameters`, then call `process_weights_after_loading`."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallelRank,
        device: torch.device,
        dtype: torch.dtype,
        precision: Precision | None = None,
    ) -> None:
        fused = config.fused_qkv or config.fused_gate_up
        if fused and tp.world_size > 1 and config.quantization is not None:
            raise EngineError(
                f"quantized {config.model_type} models cannot be divided among shards: use --num-replicas"
            )
        self.precision = Precision.of(config, dtype) if precision is None else precision
        """Final after `process_weights_after_loading`."""
        kinds = [(rope, layer.head_dim) for rope, layer in zip(config.ropes, config.layers, strict=True)]
        rotary = {kind: RotaryEmbedding(*kind, device) for kind in set(kinds)}
        self.rotary = [rotary[kind] for kind in kinds]
        """The rotation of each layer."""
        self.layers = [LayerWeights(config, index, tp, device, self.precision) for index in range(config.num_layers)]
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, device, dtype, zero_centered=config.zero_centered_norms
        )
        self._vocabulary = tp.padded(config.vocab_size)
        rows = -(-config.vocab_size // tp.world_size)
        # Padding rows are zero, and so are their logits; the gather of logits drops them.
        table = torch.zeros(rows * tp.world_size, config.hidden_size, device=device, dtype=dtype)
        self.embedding = table[: config.vocab_size]
        self.tied = config.tie_word_embeddings
        own_rows = slice(tp.rank * rows, (tp.rank + 1) * rows)
        head = table[own_rows] if self.tied else torch.zeros_like(table[own_rows])
        self.head = DenseLinear(head, None, self.precision.logits)
        """This rank's rows of the LM head; the weight may be a view of the embedding."""

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        """Return the tensors to fill, by checkpoint name."""
        parameters: dict[str, ParameterShard | Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm.weight,
        }
        own = self._vocabulary
        if not self.tied and own.length:
            shape = (own.total, self.embedding.shape[1])
            parameters["lm_head.weight"] = ParameterShard(self.head.weight[: own.length], shape, (own.start, 0))
        for layer in self.layers:
            parameters |= layer.named_parameters()
        return parameters

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """The attention of each layer on this rank."""
        return tuple(layer.shape for layer in self.layers)

    @property
    def linears(self) -> Iterator[ParallelLinear | QuantizedLinear]:
        """The projections of all layers."""
        for layer in self.layers:
            yield from layer.linears

    def process_weights_after_loading(self) -> None:
        """Prepare the loaded weights for use. A tied LM head that needs another dtype than the embedding becomes a copy."""
        self.norm.process_weights_after_loading()
        for layer in self.layers:
            layer.process_weights_after_loading()
        norms = [self.norm, *(norm for layer in self.layers for norm in (layer.input_norm, layer.mlp_norm))]
        after_norms = [self.head, *(linear for layer in self.layers for linear in (layer.qkv, *layer.mlp.after_norm))]
        after_loading = self.precision.after_loading(
            [norm.weight for norm in norms], [each.weight for each in after_norms]
        )
        if after_loading != self.precision:
            self.precision = after_loading
            for each in after_norms:
                each.weight = each.weight.to(after_loading.normed)

    def pack(self) -> None:
        """Reorder all weights for products on a CPU: see `Linear.pack`."""
        for layer in self.layers:
            layer.pack()
        self.head.pack()


def _of_heads(heads: ShardRange, head_dim: int) -> ShardRange:
    return ShardRange(heads.start * head_dim, heads.length * head_dim, heads.total * head_dim)
