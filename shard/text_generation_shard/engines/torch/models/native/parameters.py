"""The weights of a decoder, or of one rank's part of it.

Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053): a rank has some of the heads and some columns of
the MLP, so each layer has two all-reduces. Norms and the embedding are replicated; the rows of the LM head are divided and the
logits gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.layers.linear import DenseLinear, FusedProjection, ParallelLinear, Projection
from text_generation_shard.engines.torch.layers.mlp import DenseMLP
from text_generation_shard.engines.torch.layers.norm import HeadNorms, RMSNorm
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.layers.quantized.choice import QuantizedLinear, quantized_linear
from text_generation_shard.engines.torch.layers.rope import RotaryEmbedding, head_order
from text_generation_shard.engines.torch.models.native.config import ModelConfig
from text_generation_shard.engines.torch.models.native.decoder import DecoderLayer, DecoderWeights
from text_generation_shard.engines.torch.models.native.experts import Experts, ExpertsBesideMLP
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange, TensorParallelRank
from text_generation_shard.engines.torch.weights.parameter import ParameterShard


class LayerWeights(DecoderLayer):
    """Weights of one layer of a checkpoint: the projections of its attention, its MLP, and its norms."""

    qkv: ParallelLinear | QuantizedLinear
    output: ParallelLinear | QuantizedLinear
    mlp: DenseMLP | Experts | ExpertsBesideMLP

    def __init__(
        self, config: ModelConfig, index: int, tp: TensorParallelRank, device: torch.device, precision: Precision
    ) -> None:
        self._prefix = f"model.layers.{index}."
        self._config, self._device, self._precision = config, device, precision
        hidden = ShardRange.whole(config.hidden_size)
        whole = config.layers[index]
        heads, kv_heads = tp.even(config.num_heads, "attention heads"), tp.kv_heads(whole.num_kv_heads)
        self.shape = replace(whole, num_heads=heads.length, num_kv_heads=kv_heads.length)
        queries, keys = _of_heads(heads, whole.head_dim), _of_heads(kv_heads, whole.head_dim)
        attention = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys)]
        if not config.values_are_keys or whole.window is not None:
            attention.append(("self_attn.v_proj", keys))
        self.qkv_width = sum(rows.length for _, rows in attention)
        fused = "self_attn.qkv_proj" if config.family.fused_qkv else None
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
        self.sinks = torch.empty(heads.length, device=device, dtype=precision.model) if config.family.sinks else None
        self._first_head = heads.start
        self._scalar = torch.empty(1, device=device, dtype=precision.model) if config.family.layer_scalars else None
        self.scale = 1.0
        names, hidden_size = config.family.norms, config.hidden_size
        self.input_norm, self.mlp_norm = self._norm(hidden_size), self._norm(hidden_size)
        self.after_attention = self._norm(hidden_size) if names.after_attention else None
        self.after_mlp = self._norm(hidden_size) if names.after_mlp else None
        self.head_norms: HeadNorms | None = None
        if config.family.query_key_norm:
            query_norm, key_norm = self._norm(whole.head_dim), self._norm(whole.head_dim)
            self.head_norms = HeadNorms(query_norm, key_norm, values=config.family.value_norm)

    def _mlp(self, index: int, tp: TensorParallelRank) -> DenseMLP | Experts | ExpertsBesideMLP:
        experts, hidden_size = self._config.experts, self._config.hidden_size
        if experts is None or not experts.layers[index]:
            return self._dense_mlp("mlp", self._config.intermediate_size, tp)
        shared = self._dense_mlp("mlp.shared_expert", experts.shared_inner, tp) if experts.shared_inner else None
        sparse = Experts(self._config, self._prefix, tp, self._device, self._precision.model, shared)
        if not experts.family.beside_mlp:
            return sparse
        dense = self._dense_mlp("mlp", self._config.intermediate_size, tp)
        return ExpertsBesideMLP(sparse, dense, self._prefix, self._norm, hidden_size)

    def _dense_mlp(self, name: str, inner_size: int, tp: TensorParallelRank) -> DenseMLP:
        config, hidden = self._config, ShardRange.whole(self._config.hidden_size)
        inner = tp.even(inner_size, "inner values of the MLP")
        gate_up = [(f"{name}.gate_proj", inner), (f"{name}.up_proj", inner)]
        fused = f"{name}.gate_up_proj" if config.family.fused_gate_up else None
        down = Projection(f"{self._prefix}{name}.down_proj", hidden, inner)
        return DenseMLP(
            self._linear(self._projections(gate_up, fused, tp), bias=config.mlp_bias),
            self._linear([down], bias=config.mlp_bias and tp.rank == 0),
            config.activation,
        )

    def _norm(self, width: int, factor: float = 1.0) -> RMSNorm:
        config, dtype = self._config, self._precision.model
        zero_centered = config.family.zero_centered_norms
        return RMSNorm(width, config.rms_norm_eps, self._device, dtype, zero_centered=zero_centered, factor=factor)

    @property
    def _norms(self) -> dict[str, RMSNorm]:
        """The norms of the residual stream and of the outputs, by name."""
        names = self._config.family.norms
        norms = {names.before_attention: self.input_norm, names.before_mlp: self.mlp_norm}
        if names.after_attention and self.after_attention:
            norms[names.after_attention] = self.after_attention
        if names.after_mlp and self.after_mlp:
            norms[names.after_mlp] = self.after_mlp
        return norms

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
            for norm in (self.head_norms.query, self.head_norms.key):
                norm.process_weights_after_loading()
            self.head_norms.fill_rows(self.shape.num_heads, self.shape.num_kv_heads, self._head_order)
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


def empty_weights(
    config: ModelConfig, tp: TensorParallelRank, device: torch.device, dtype: torch.dtype, *, on_cpu: bool
) -> ModelWeights:
    """Return the empty weights of a rank, with the precision of a CPU or a GPU."""
    if on_cpu:
        # A CPU has no quantized products: weights are dequantized while they load.
        return ModelWeights(replace(config, quantization=None), tp, device, Precision.uniform(dtype))
    # Weights of FP8 and of experts are so coarse that more bits would not help.
    rounded = config.quantization is not None or config.experts is not None
    return ModelWeights(config, tp, device, Precision.of(config.hidden_size, dtype, rounded=rounded))


class ModelWeights(DecoderWeights):
    """All weights of a rank. Created empty: fill `named_parameters`, then call `process_weights_after_loading`."""

    layers: list[LayerWeights]

    def __init__(self, config: ModelConfig, tp: TensorParallelRank, device: torch.device, precision: Precision) -> None:
        dtype = precision.model
        fused = config.family.fused_qkv or config.family.fused_gate_up
        if fused and tp.world_size > 1 and config.quantization is not None:
            raise EngineError(
                f"quantized {config.model_type} models cannot be divided among shards: use --num-replicas"
            )
        self.precision = precision
        """Final after `process_weights_after_loading`."""
        kinds = [(rope, layer.head_dim) for rope, layer in zip(config.ropes, config.layers, strict=True)]
        rotary = {kind: RotaryEmbedding(*kind, device) for kind in set(kinds)}
        self.rotary = [rotary[kind] for kind in kinds]
        self.layers = [LayerWeights(config, index, tp, device, self.precision) for index in range(config.num_layers)]
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, device, dtype, zero_centered=config.family.zero_centered_norms
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

    def process_weights_after_loading(self) -> None:
        """Prepare the loaded weights for use. A tied LM head that needs another dtype than the embedding becomes a copy."""
        self.norm.process_weights_after_loading()
        for layer in self.layers:
            layer.process_weights_after_loading()
        # The weights of experts count as rounded, so the precision of a model that has any does not change.
        self.convert()

    def pack(self) -> None:
        """Reorder all weights for products on a CPU: see `Linear.pack`."""
        for layer in self.layers:
            layer.pack()
        self.head.pack()


def _of_heads(heads: ShardRange, head_dim: int) -> ShardRange:
    return ShardRange(heads.start * head_dim, heads.length * head_dim, heads.total * head_dim)
