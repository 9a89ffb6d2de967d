"""Mamba 2 (Dao and Gu 2024, arXiv 2405.21060) of Granite 4, Bamba, Falcon-H1 and Nemotron-H: weights and states."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from text_generation_shard.engines.torch.batch.state_rows import StateRows
from text_generation_shard.engines.torch.kernels.operands import GatedNorm, Recurrence
from text_generation_shard.engines.torch.layers.linear import ParallelLinear
from text_generation_shard.engines.torch.layers.ops import Ops
from text_generation_shard.engines.torch.models.native.projections import LayerProjections
from text_generation_shard.engines.torch.models.native.state_config import Multipliers, StateConfig
from text_generation_shard.engines.torch.models.native.state_layer import Parameters, StateLayer
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange


class Mamba(StateLayer):
    """The projections are gates, values, keys, queries and steps, in Mamba's terms z, x, B, C and dt. Not divided among ranks."""

    def __init__(self, states: StateConfig, eps: float, projections: LayerProjections) -> None:
        keys, values, heads = states.keys, states.values, states.heads
        self._parts = [values, values, keys, keys, heads]
        self.mixed_width, self.projected_width = values, sum(self._parts)
        super().__init__(
            projections,
            [projections.of_hidden([("in_proj", ShardRange.whole(self.projected_width))], bias=states.bias)],
            projections.to_hidden("out_proj", ShardRange.whole(values), bias=states.bias),
            [ShardRange.whole(values + 2 * keys)],
            taps=states.taps,
            bias=states.convolution_bias,
        )
        self._prefix = projections.prefix
        device = projections.device

        def numbers() -> Tensor:
            return torch.empty(heads, device=device, dtype=torch.float32)

        self._decay_log, self._skip = numbers(), numbers()
        self._recurrence = Recurrence(
            heads=heads,
            groups=states.groups,
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
        self._norm = GatedNorm(weight, eps, values // states.groups, states.gate_first)
        self._states = torch.empty(0, heads, states.key_width, states.value_width, device=device)

    def named_parameters(self) -> Parameters:
        parameters = super().named_parameters() | {
            f"{self._prefix}A_log": self._decay_log,
            f"{self._prefix}dt_bias": self._recurrence.step_bias,
            f"{self._prefix}D": self._skip,
        }
        if self._norm.weight is not None:
            parameters[f"{self._prefix}norm.weight"] = self._norm.weight
        return parameters

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        self._recurrence.decay = self._decay_log.exp()

    def multiply(self, multipliers: Multipliers) -> None:
        """Multiply the loaded projections."""
        (inputs,) = self.inputs
        assert isinstance(inputs, ParallelLinear)
        assert isinstance(self.output, ParallelLinear)
        for rows, factor in zip(torch.split(inputs.weight, self._parts), multipliers.state_parts, strict=True):
            rows.mul_(factor)
        self.output.weight.mul_(multipliers.state_out)

    def mix(self, ops: Ops, rows: StateRows, projected: Tensor, out: Tensor | None) -> Tensor:
        gates, convolved, steps = torch.split(projected, [self._parts[0], sum(self._parts[1:4]), self._parts[4]], dim=1)
        convolved = ops.convolve(convolved, self.convolution, self._history, rows)
        mixed = ops.scan(convolved, steps, None, self._recurrence, self._states, rows)
        return ops.gated_norm(mixed, gates, self._norm, out)
