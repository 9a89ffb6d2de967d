"""The weights of the attention of a layer, or one rank's part of them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from text_generation_shard.engines.torch.layers.linear import ParallelLinear
from text_generation_shard.engines.torch.layers.norm import HeadNorms, RMSNorm
from text_generation_shard.engines.torch.layers.rope import head_order
from text_generation_shard.engines.torch.models.native.decoder import AttentionPart
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig
from text_generation_shard.engines.torch.models.native.projections import AnyLinear, LayerProjections, of_heads
from text_generation_shard.engines.torch.models.native.state_config import Multipliers
from text_generation_shard.engines.torch.weights.parameter import ParameterShard


class AttentionWeights(AttentionPart):
    """The projections of an attention, the norms of its heads, and its sinks."""

    qkv: AnyLinear
    output: AnyLinear

    def __init__(
        self, config: ModelConfig, index: int, projections: LayerProjections, norm: Callable[[int], RMSNorm]
    ) -> None:
        family, whole, tp = config.family, config.layers[index], projections.tp
        self._config, self._prefix = config, projections.prefix
        heads, kv_heads = tp.even(config.num_heads, "attention heads"), tp.kv_heads(whole.num_kv_heads)
        self.shape = replace(whole, num_heads=heads.length, num_kv_heads=kv_heads.length)
        self.is_gated, module = family.gated_attention, family.names.attention
        self._module = module
        queries, keys = of_heads(heads, whole.head_dim), of_heads(kv_heads, whole.head_dim)
        gated = of_heads(heads, 2 * whole.head_dim) if self.is_gated else queries
        parts = [(f"{module}.q_proj", gated), (f"{module}.k_proj", keys)]
        if not config.values_are_keys or whole.window is not None:
            parts.append((f"{module}.v_proj", keys))
        self.qkv_width = sum(rows.length for _, rows in parts)
        self._head_order = head_order(config.ropes[index], whole.head_dim)
        self._reorders = self._head_order is not None or self.is_gated
        fused = f"{module}.qkv_proj" if family.fused_qkv else None
        self.qkv = projections.of_hidden(parts, fused, bias=config.qkv_bias)
        self.output = projections.to_hidden(
            f"{module}.{family.names.attention_output}", queries, bias=config.output_bias
        )
        self._first_head = heads.start
        dtype, device = projections.precision.model, projections.device
        self.sinks = torch.empty(heads.length, device=device, dtype=dtype) if family.sinks else None
        self.head_norms: HeadNorms | None = None
        if config.query_key_norm:
            self.head_norms = HeadNorms(norm(whole.head_dim), norm(whole.head_dim), values=family.value_norm)
        if family.joint_query_key_norm:
            self.joint_norms = norm(queries.total), norm(keys.total)

    @property
    def _query_key_norms(self) -> tuple[RMSNorm, ...]:
        return self.joint_norms or (() if self.head_norms is None else (self.head_norms.query, self.head_norms.key))

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        parameters: dict[str, ParameterShard | Tensor] = {}
        names = self._config.family.names
        for name, norm in zip((names.query_norm, names.key_norm), self._query_key_norms, strict=False):
            parameters[f"{self._prefix}{self._module}.{name}.weight"] = norm.weight
        if self.sinks is not None:
            parameters[f"{self._prefix}{self._module}.sinks"] = ParameterShard(
                self.sinks, (self._config.num_heads,), (self._first_head,)
            )
        return {**parameters, **self.qkv.named_parameters(), **self.output.named_parameters()}

    def process_weights_after_loading(self) -> None:
        self.qkv.process_weights_after_loading(self._row_order() if self._reorders else None)
        self.output.process_weights_after_loading()
        for norm in self._query_key_norms:
            norm.process_weights_after_loading()
        if self.head_norms is not None:
            self.head_norms.fill_rows(self.shape.num_heads, self.shape.num_kv_heads, self._head_order)

    def multiply(self, multipliers: Multipliers) -> None:
        assert isinstance(self.qkv, ParallelLinear)
        assert isinstance(self.output, ParallelLinear)
        first = self.shape.num_heads * self.shape.head_dim
        self.qkv.weight.mul_(multipliers.attention_in)
        self.qkv.weight[first : first + self.shape.num_kv_heads * self.shape.head_dim].mul_(multipliers.key)
        self.output.weight.mul_(multipliers.attention_out)

    def pack(self) -> None:
        self.qkv.pack()
        self.output.pack()

    def _row_order(self) -> Tensor:
        """Return the row of the loaded projections at each of ours: see `head_order`, and `AttentionPart.qkv_width`."""
        heads, kv_heads, head_dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        order = self._head_order or list(range(head_dim))
        rows = torch.arange(self.qkv_width).view(-1, head_dim)
        first_key = heads * (1 + self.is_gated)
        queries, gates = rows[:first_key], rows[:0]
        if self.is_gated:
            queries, gates = queries[::2], queries[1::2]
        keys, values = rows[first_key : first_key + kv_heads], rows[first_key + kv_heads :]
        return torch.cat((queries[:, order], keys[:, order], values, gates)).flatten()
