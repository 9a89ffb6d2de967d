"""Mamba 2 (Dao and Gu 2024, arXiv 2405.21060) of Granite 4, Bamba, Falcon-H1 and Nemotron-H: weights and states."""

import math

import torch
from torch import Tensor

from text_generation_shard.engines.torch.batch.state_rows import StateRows
from text_generation_shard.engines.torch.kernels.operands import GatedNorm, Recurrence
from text_generation_shard.engines.torch.layers.linear import ParallelLinear
from text_generation_shard.engines.torch.layers.ops import Ops
from text_generation_shard.engines.torch.models.native.projections import LayerProjections, of_heads
from text_generation_shard.engines.torch.models.native.state_config import Multipliers, StateConfig
from text_generation_shard.engines.torch.models.native.state_layer import Parameters, StateLayer, of_rank


class Mamba(StateLayer):
    """The projections are gates, values, keys, queries and steps, in Mamba's terms z, x, B, C and dt. A rank has some groups of heads.

    Without a norm, which reads all heads of a group, ranks may share a group.
    """

    def __init__(self, states: StateConfig, eps: float, projections: LayerProjections) -> None:
        tp = projections.tp
        self._heads = tp.even(states.heads, "heads of Mamba")
        groups = tp.even(states.groups, "groups of Mamba") if states.has_norm else tp.kv_heads(states.groups)
        all_keys, self._all_values = of_heads(groups, states.key_width), of_heads(self._heads, states.value_width)
        ranges = [self._all_values, self._all_values, all_keys, all_keys, self._heads]
        self._parts = [part.length for part in ranges]
        values, keys, heads = self._all_values.length, all_keys.length, self._heads.length
        self.mixed_width, self.projected_width = values, sum(self._parts)
        names = [f"in_proj.{part}" for part in ("gates", "values", "keys", "queries", "steps")]
        super().__init__(
            projections,
            [projections.of_hidden(list(zip(names, ranges, strict=True)), "in_proj", bias=states.bias)],
            projections.to_hidden("out_proj", self._all_values, bias=states.bias),
            ranges[1:4],
            taps=states.taps,
            drafts=states.drafts,
            bias=states.convolution_bias,
        )
        self._prefix = projections.prefix
        device = projections.device

        def numbers() -> Tensor:
            return torch.empty(heads, device=device, dtype=torch.float32)

        self._decay_log, self._skip = numbers(), numbers()
        self._recurrence = Recurrence(
            heads=heads,
            groups=groups.length,
            key_width=states.key_width,
            value_width=states.value_width,
            query_start=values + keys,
            key_start=values,
            value_start=0,
            decay=self._decay_log,
            step_bias=numbers(),
            skip=self._skip,
            delta=False,
            step_limits=(states.least_step, math.inf),
        )
        weight = torch.empty(values, device=device, dtype=projections.precision.model) if states.has_norm else None
        self._norm = GatedNorm(weight, eps, states.values // states.groups, states.gate_first)
        self._add_pools(self._recurrence, states, projections.precision.model)

    def named_parameters(self) -> Parameters:
        parameters = super().named_parameters() | {
            f"{self._prefix}A_log": of_rank(self._decay_log, self._heads),
            f"{self._prefix}dt_bias": of_rank(self._recurrence.step_bias, self._heads),
            f"{self._prefix}D": of_rank(self._skip, self._heads),
        }
        if self._norm.weight is not None:
            parameters[f"{self._prefix}norm.weight"] = of_rank(self._norm.weight, self._all_values)
        return parameters

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        self._recurrence.decay = self._decay_log.exp()

    def multiply(self, multipliers: Multipliers) -> None:
        (inputs,) = self.inputs
        assert isinstance(inputs, ParallelLinear)
        assert isinstance(self.output, ParallelLinear)
        for rows, factor in zip(torch.split(inputs.weight, self._parts), multipliers.state_parts, strict=True):
            rows.mul_(factor)
        self.output.weight.mul_(multipliers.state_out)

    def mix(self, ops: Ops, rows: StateRows, projected: Tensor, out: Tensor | None) -> Tensor:
        gates, convolved, steps = torch.split(projected, [self._parts[0], sum(self._parts[1:4]), self._parts[4]], dim=1)
        convolved = ops.convolve(convolved, self.convolution, self._history, rows)
        mixed = ops.scan(convolved, steps, None, self._recurrence, self._states, self._drafted, rows)
        return ops.gated_norm(mixed, gates, self._norm, out)
