"""The buffers of a forward pass of a decoder."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    """Buffers around the attention of a layer and its part with a state; None where each result is a new tensor."""

    qkv: Tensor | None = None
    """[tokens, (num_heads + 2·num_kv_heads)·head_dim], or less if values are keys: output of the fused projection."""
    queries: Tensor | None = None
    """[tokens, num_heads, head_dim]: rotated queries; a view of `qkv` if both have the same dtype."""
    attended: Tensor | None = None
    """[tokens, num_heads·head_dim]: output of attention."""
    projected: Tensor | None = None
    """[tokens, projected_width]: input of the part with a state."""
    mixed: Tensor | None = None
    """[tokens, mixed_width]: its output."""

    def first(self, tokens: int) -> "LayerBuffers":
        buffers = self.qkv, self.queries, self.attended, self.projected, self.mixed
        return LayerBuffers(*(_first(buffer, tokens) for buffer in buffers))


@dataclass(frozen=True, slots=True)
class Activations:
    """Buffers of a forward pass that all layers use; None where each result is a new tensor."""

    residual: Tensor | None = None
    """float32 [tokens, hidden]."""
    normed: Tensor | None = None
    """[tokens, hidden]: at the end, the normed output of the last layer."""
    layers: "Sequence[LayerBuffers]" = ()
    """For each layer, in the same memory; layers of the same widths have the same ones. Empty without buffers."""

    def of(self, layer: int) -> "LayerBuffers":
        return self.layers[layer] if self.layers else LayerBuffers()

    def first(self, tokens: int) -> "Activations":
        views = {id(each): each.first(tokens) for each in self.layers}
        layers = [views[id(each)] for each in self.layers]
        return Activations(_first(self.residual, tokens), _first(self.normed, tokens), layers)


def _first(buffer: Tensor | None, tokens: int) -> Tensor | None:
    return None if buffer is None else buffer[:tokens]
