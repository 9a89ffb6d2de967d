"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464) of Qwen3-Next, Qwen3.5 and OLMo Hybrid: weights, or one rank's part, and states.

Queries, keys and values of the hidden states pass a short convolution and a recurrence; its outputs are normed head by head and
gated. A rank has some groups of heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_shard.engines.torch.batch.state_rows import StateRows
from text_generation_shard.engines.torch.kernels.operands import GatedNorm, Recurrence
from text_generation_shard.engines.torch.layers.ops import Ops
from text_generation_shard.engines.torch.models.native.projections import AnyLinear, LayerProjections, of_heads
from text_generation_shard.engines.torch.models.native.state_config import StateConfig
from text_generation_shard.engines.torch.models.native.state_layer import Parameters, StateLayer, of_rank
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange

MODULES = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "norm")
SEPARATE_MODULES = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_proj", "o_norm")
SEPARATE_EPS = 1e-5
"""The library reads no epsilon of this norm from the config."""


class GatedDeltaNet(StateLayer):
    """The projections are queries, keys, values and gates of the outputs, then a beta and a step for each head."""

    def __init__(self, states: StateConfig, eps: float, projections: LayerProjections) -> None:
        tp, share = projections.tp, states.heads // states.groups
        self._groups = tp.even(states.groups, "heads of keys")
        self._heads = of_heads(self._groups, share)
        keys, values = of_heads(self._groups, states.key_width), of_heads(self._heads, states.value_width)
        self._fused, self._separate, self._config = states.family.fused, states.family.separate, states
        self._modules = SEPARATE_MODULES if self._separate else MODULES
        super().__init__(
            projections,
            self._projections(projections, keys, values),
            projections.to_hidden(self._modules[-2], values, bias=False),
            [keys, keys, values],
            taps=states.taps,
            drafts=states.drafts,
        )
        self._prefix = projections.prefix
        heads, device = self._heads.length, projections.device
        self._keys, self._values = keys.length, values.length
        self.mixed_width = self._values
        self._convolved = 2 * self._keys + self._values
        self.projected_width = self._convolved + self._values + 2 * heads

        def numbers() -> Tensor:
            return torch.empty(heads, device=device, dtype=torch.float32)

        self._decay_log = numbers()
        self._recurrence = Recurrence(
            heads=heads,
            groups=self._groups.length,
            key_width=states.key_width,
            value_width=states.value_width,
            query_start=0,
            key_start=self._keys,
            value_start=2 * self._keys,
            decay=self._decay_log,
            step_bias=numbers(),
            skip=None,
            delta=True,
            beta_scale=states.beta_scale,
        )
        self._norm_weight = torch.empty(states.value_width, device=device, dtype=projections.precision.model)
        eps = SEPARATE_EPS if self._separate else eps
        self._norm = GatedNorm(self._norm_weight, eps, states.value_width, gate_first=False)
        self._add_pools(self._recurrence, states, projections.precision.model)

    def _projections(self, projections: LayerProjections, keys: ShardRange, values: ShardRange) -> list[AnyLinear]:
        if self._fused:
            states, share = self._config, self._config.heads // self._config.groups
            width = 2 * (states.key_width + share * states.value_width)
            wide = projections.projections([("in_proj_qkvz", of_heads(self._groups, width))])
            narrow = projections.projections([("in_proj_ba", of_heads(self._groups, 2 * share))])
        else:
            rows = [keys, keys, values, values, self._heads, self._heads]
            parts = list(zip(self._modules[:6], rows, strict=True))
            fused = None if self._separate else "in_proj_qkv"
            wide = [*projections.projections(parts[:3], fused), *projections.projections(parts[3:4])]
            narrow = projections.projections(parts[4:])
        # Checkpoints do not quantize the narrow ones.
        lists = [[*wide, *narrow]] if projections.scheme is None else [wide, narrow]
        return [projections.linear(each, bias=False) for each in lists]

    def named_parameters(self) -> Parameters:
        return super().named_parameters() | {
            f"{self._prefix}A_log": of_rank(self._decay_log, self._heads),
            f"{self._prefix}dt_bias": of_rank(self._recurrence.step_bias, self._heads),
            f"{self._prefix}{self._modules[-1]}.weight": self._norm_weight,
        }

    def _channel_parameters(self, name: str, tensor: Tensor) -> Parameters:
        if not self._separate:
            return super()._channel_parameters(name, tensor)
        rows = torch.split(tensor, [part.length for part in self._channels])
        return {f"{self._prefix}{each}_conv1d.weight": own for each, own in zip("qkv", rows, strict=True)}

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        self._recurrence.decay = self._decay_log.exp()
        # The norm of each head has the same weight.
        self._norm.weight = self._norm_weight.repeat(self._heads.length)

    def mix(self, ops: Ops, rows: StateRows, projected: Tensor, out: Tensor | None) -> Tensor:
        heads = self._heads.length
        qkv, gates, betas, steps = torch.split(projected, [self._convolved, self._values, heads, heads], dim=1)
        convolved = ops.convolve(qkv, self.convolution, self._history, rows)
        mixed = ops.scan(convolved, steps, betas, self._recurrence, self._states, self._drafted, rows)
        return ops.gated_norm(mixed, gates, self._norm, out)

    def input_orders(self) -> Sequence[Tensor | None]:
        """Return the loaded row at each of ours: those of each group of heads are together in fused projections."""
        if not self._fused:
            return super().input_orders()
        keys, share = self._config.key_width, self._config.heads // self._config.groups
        values, groups = share * self._config.value_width, self._groups.length
        wide = torch.arange(groups * 2 * (keys + values)).view(groups, -1)
        narrow = torch.arange(groups * 2 * share).view(groups, -1)
        orders = [
            torch.cat([part.flatten() for part in torch.split(rows, lengths, dim=1)])
            for rows, lengths in ((wide, [keys, keys, values, values]), (narrow, [share, share]))
        ]
        return orders if len(self.inputs) > 1 else [torch.cat((orders[0], orders[1] + wide.numel()))]
