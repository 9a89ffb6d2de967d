"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): the weights of a layer, or one rank's part of them.

A token has one row for all heads, its key and value: a normed latent vector c and a rotated key r. The projections of c to the keys
and values of the heads are absorbed into queries and outputs, so that heads attend to the rows themselves:

    score = (q_plain · W_k) · c + q_rotated · r        output = (Σ weight · c) · W_v
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from text_generation_shard.engines.torch.attention.step import Step
from text_generation_shard.engines.torch.layers.linear import ParallelLinear, Projection
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.layers.ops import Ops, ResidualStream
from text_generation_shard.engines.torch.models.native.buffers import LayerBuffers
from text_generation_shard.engines.torch.models.native.decoder import AttentionPart, AttentionPlace
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig
from text_generation_shard.engines.torch.models.native.projections import AnyLinear, LayerProjections, of_heads
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange
from text_generation_shard.engines.torch.weights.parameter import ParameterShard

NORM_EPS = 1e-6
"""The eps of the norms inside attention, which transformers' classes do not take from the config."""


class LatentAttention(AttentionPart):
    """A rank has some heads; the projections to the rows, and to the numbers that queries are projected from, are whole on each."""

    qkv: AnyLinear
    output: AnyLinear

    def __init__(
        self, config: ModelConfig, index: int, projections: LayerProjections, norm: Callable[[int], RMSNorm]
    ) -> None:
        sizes, whole, module = config.latent, ShardRange.whole, config.family.names.attention
        assert sizes is not None
        self._sizes, self._prefix = sizes, f"{projections.prefix}{module}."
        heads = projections.tp.even(config.num_heads, "attention heads")
        self.shape = replace(config.layers[index], num_heads=heads.length)
        queries, row = of_heads(heads, sizes.plain + sizes.rotated), sizes.rank + sizes.rotated
        first = ("q_a_proj", whole(sizes.query_rank)) if sizes.query_rank else ("q_proj", queries)
        self._widths = [first[1].length, sizes.rank, sizes.rotated]
        self.qkv_width = sum(self._widths)
        parts = [(f"{module}.{name}", rows) for name, rows in (first, ("kv_a_proj_with_mqa", whole(row)))]
        self.qkv = projections.of_hidden(parts, bias=config.qkv_bias)
        self.output = projections.to_hidden(
            f"{module}.{config.family.names.attention_output}", of_heads(heads, sizes.value), bias=config.output_bias
        )
        self._queries: AnyLinear | None = None
        if sizes.query_rank:
            expanded = Projection(f"{self._prefix}q_b_proj", queries, whole(sizes.query_rank))
            self._queries = projections.linear([expanded], bias=False)
        # Not in a packed format, and without adapters: its halves are absorbed.
        keys_values = Projection(
            f"{self._prefix}kv_b_proj", of_heads(heads, sizes.plain + sizes.value), whole(sizes.rank)
        )
        self._expansion = ParallelLinear([keys_values], projections.device, projections.precision, bias=False)
        self._norms = {"kv_a_layernorm": norm(sizes.rank)}
        if sizes.query_rank:
            self._norms["q_a_layernorm"] = norm(sizes.query_rank)
        for each in self._norms.values():
            each.eps = NORM_EPS
        self._interleaved = config.ropes[index].interleaved
        self.head_norms = self.sinks = None

    @property
    def _linears(self) -> list[AnyLinear]:
        return [each for each in (self.qkv, self._queries, self.output) if each is not None]

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        parameters: dict[str, ParameterShard | Tensor] = {**self._expansion.named_parameters()}
        for each in self._linears:
            parameters |= each.named_parameters()
        return parameters | {f"{self._prefix}{name}.weight": norm.weight for name, norm in self._norms.items()}

    def process_weights_after_loading(self) -> None:
        for each in self._linears:
            each.process_weights_after_loading()

    def pack(self) -> None:
        for each in self._linears:
            each.pack()

    def attend(
        self,
        ops: Ops,
        step: Step,
        stream: ResidualStream,
        norm: RMSNorm | None,
        place: AttentionPlace,
        own: LayerBuffers,
    ) -> Tensor:
        sizes, tokens, rotary = self._sizes, step.num_tokens, place.rotary
        queries, latent, key = torch.split(ops.norm_linear(stream, norm, self.qkv, own.qkv), self._widths, dim=1)
        if self._queries is not None:
            queries = self._queries(self._norms["q_a_layernorm"](queries))
        heads = queries.view(tokens, -1, sizes.plain + sizes.rotated)
        plain, rotated = torch.split(heads, [sizes.plain, sizes.rotated], dim=2)
        rotated = torch.cat((rotated, key.unsqueeze(1)), dim=1)
        if self._interleaved:
            rotated = rotated.view(tokens, -1, sizes.rotated // 2, 2).transpose(2, 3).flatten(2)
        rotated = step.rotated(rotated, rotary)
        row = torch.cat((self._norms["kv_a_layernorm"](latent), rotated[:, -1]), dim=1).unsqueeze(0)
        step.append(place.layer, row, row)
        expansion = self._expansion.weight.view(self.shape.num_heads, -1, sizes.rank)
        to_keys, to_values = torch.split(expansion, [sizes.plain, sizes.value], dim=1)
        absorbed = torch.bmm(plain.transpose(0, 1), to_keys).transpose(0, 1)
        queries = torch.cat((absorbed, rotated[:, :-1]), dim=2)
        if rotary.rope.query_beta:
            queries *= rotary.query_factors(step.positions).view(-1, 1, 1).to(queries.dtype)
        attended = step.attend(place.layer, queries, place.rules).view(tokens, -1, sizes.rank)
        return torch.bmm(attended.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1).flatten(1)
