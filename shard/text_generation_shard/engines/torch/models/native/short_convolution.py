"""Short convolutions of LFM2: weights and states."""

import torch
from torch import Tensor

from text_generation_shard.engines.torch.batch.state_rows import StateRows
from text_generation_shard.engines.torch.layers.ops import Ops
from text_generation_shard.engines.torch.models.native.projections import LayerProjections
from text_generation_shard.engines.torch.models.native.state_config import StateConfig
from text_generation_shard.engines.torch.models.native.state_layer import StateLayer
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange


class ShortConvolution(StateLayer):
    """The projections are gates of the inputs, gates of the outputs, and the values. Not divided among ranks."""

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
