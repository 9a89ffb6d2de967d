"""The parts that all layers with a state have: projections around a short convolution, and pools of states.

The last block of a pool is that of the padding rows of graphs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_shard.engines.torch.batch.state_rows import StateRows
from text_generation_shard.engines.torch.kernels.operands import Convolution, Recurrence
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.layers.ops import Ops, ResidualStream
from text_generation_shard.engines.torch.models.native.projections import AnyLinear, LayerProjections
from text_generation_shard.engines.torch.models.native.state_config import StateConfig
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange
from text_generation_shard.engines.torch.weights.parameter import ParameterShard

Parameters = dict[str, ParameterShard | Tensor]


class StateLayer:
    """The part of a layer that mixes tokens by a state for each sequence, instead of attention or beside it.

    `channels` are the ranges of the convolution's channels that this rank has.
    """

    projected_width: int
    """Outputs of `project`."""
    mixed_width: int
    """Outputs of `mix`, and inputs of `output`."""

    def __init__(  # noqa: PLR0913 – all that differs between the kinds
        self,
        projections: LayerProjections,
        inputs: Sequence[AnyLinear],
        output: AnyLinear,
        channels: Sequence[ShardRange],
        *,
        taps: int,
        drafts: int,
        convolution: str = "conv1d",
        bias: bool = False,
        activates: bool = True,
    ) -> None:
        self.output = output
        self.inputs, self._channels = inputs, channels  # `inputs`: the linear layers of `project`
        self._convolution_name = f"{projections.prefix}{convolution}"
        device, dtype = projections.device, projections.precision.model
        width = sum(part.length for part in channels)
        self._taps = torch.empty(width, 1, taps, device=device, dtype=dtype)
        self._bias = torch.empty(width, device=device, dtype=dtype) if bias else None
        self.convolution = Convolution(self._taps[:, 0].t(), self._bias, activates)
        self._history = torch.empty(0, taps - 1 + drafts, width, device=device, dtype=projections.precision.products)
        """Inputs of the convolution: see `Convolution`."""
        self._states = self._drafted = torch.empty(0, device=device)
        """States of the recurrence, if the layer has one, and inputs of drafts: see `Recurrence`."""

    @property
    def pools(self) -> list[Tensor]:
        """The states, [blocks, …] each."""
        return [pool for pool in (self._history, self._states, self._drafted) if pool.ndim > 1 and pool.shape[1]]

    @property
    def state_bytes(self) -> int:
        return sum(pool.shape[1:].numel() * pool.itemsize for pool in self.pools)

    def allocate(self, blocks: int) -> None:
        """Replace the pools by such of `blocks` blocks."""
        # The old ones are freed first: both need not fit at once.
        for name in ("_history", "_states", "_drafted"):
            shape = getattr(self, name).shape[1:]
            setattr(self, name, getattr(self, name).new_empty(0, *shape))
            setattr(self, name, getattr(self, name).new_zeros(blocks, *shape))

    def _add_pools(self, recurrence: Recurrence, states: StateConfig, dtype: torch.dtype) -> None:
        """Add those of a recurrence; `dtype` is that of the model."""
        shape = recurrence.heads, recurrence.key_width, recurrence.value_width
        self._states = self._history.new_empty(0, *shape, dtype=states.dtype or dtype)
        places = 2 * states.drafts + 1 if states.drafts else 0
        self._drafted = self._history.new_empty(0, places, recurrence.draft_width)

    def project(self, ops: Ops, stream: ResidualStream, norm: RMSNorm | None, out: Tensor | None) -> Tensor:
        """Return the projections of the normed stream, [tokens, projected_width]; written to `out` if given."""
        if len(self.inputs) == 1:
            return ops.norm_linear(stream, norm, self.inputs[0], out)
        normed = ops.norm(stream, norm)
        return torch.cat([linear(normed) for linear in self.inputs], dim=1, out=out)

    def mix(self, ops: Ops, rows: StateRows, projected: Tensor, out: Tensor | None) -> Tensor:
        """Return the values [tokens, mixed_width] that `output` multiplies, and update the states of the sequences."""
        raise NotImplementedError

    def input_orders(self) -> Sequence[Tensor | None]:
        """Return the loaded output at each of ours, for each of `inputs`; None where the order stays."""
        return [None] * len(self.inputs)

    def named_parameters(self) -> Parameters:
        parameters: Parameters = {}
        for kind, tensor in (("weight", self._taps), ("bias", self._bias)):
            if tensor is not None:
                parameters |= self._channel_parameters(f"{self._convolution_name}.{kind}", tensor)
        for each in (*self.inputs, self.output):
            parameters |= each.named_parameters()
        return parameters

    def process_weights_after_loading(self) -> None:
        for each, order in zip(self.inputs, self.input_orders(), strict=True):
            each.process_weights_after_loading(order)
        self.output.process_weights_after_loading()
        self.convolution.weight = self._taps[:, 0].t().contiguous()

    def pack(self) -> None:
        """Reorder the loaded weights for products on a CPU: see `Linear.pack`."""
        for each in (*self.inputs, self.output):
            each.pack()

    def _channel_parameters(self, name: str, tensor: Tensor) -> Parameters:
        """Return the rows of each of the ranges of channels, which follow each other in one tensor of the checkpoint."""
        if all(part.length == part.total for part in self._channels):
            return {name: tensor}
        parameters: Parameters = {}
        first_row, shape = 0, tensor.shape[1:]
        total = sum(part.total for part in self._channels)
        rows = torch.split(tensor, [part.length for part in self._channels])
        for index, (part, own) in enumerate(zip(self._channels, rows, strict=True)):
            starts = (first_row + part.start, *(0 for _ in shape))
            parameters[f"{name}.{index}"] = ParameterShard(own, (total, *shape), starts, name)
            first_row += part.total
        return parameters


class ShortConvolution(StateLayer):
    """A short convolution of LFM2: the projections are gates of the inputs, gates of the outputs, and the values. Not divided among ranks."""

    def __init__(self, states: StateConfig, projections: LayerProjections) -> None:
        width = projections.hidden.total
        self.mixed_width, self.projected_width = width, 3 * width
        super().__init__(
            projections,
            [projections.of_hidden([("in_proj", ShardRange.whole(3 * width))], bias=states.bias)],
            projections.to_hidden("out_proj", projections.hidden, bias=states.bias),
            [projections.hidden],
            taps=states.taps,
            drafts=states.drafts,
            convolution="conv",
            bias=states.convolution_bias,
            activates=False,
        )

    def mix(self, ops: Ops, rows: StateRows, projected: Tensor, out: Tensor | None) -> Tensor:
        input_gates, output_gates, values = projected.chunk(3, dim=1)
        convolved = ops.convolve(input_gates * values, self.convolution, self._history, rows)
        return torch.mul(output_gates, convolved, out=out) if out is not None else convolved.mul_(output_gates)


def of_rank(tensor: Tensor, heads: ShardRange) -> ParameterShard:
    """Return the parameter of this rank's heads of a vector with a number for each head."""
    return ParameterShard(tensor, (heads.total,), (heads.start,))
