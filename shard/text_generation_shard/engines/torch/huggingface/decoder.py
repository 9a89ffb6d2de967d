"""The native decoder with the weights of a model of transformers whose layers have the usual form: see find_decoder.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module

from text_generation_shard.engines.torch.attention.shape import LayerShape
from text_generation_shard.engines.torch.model.decoder import Decoder, DecoderLayer, LayerMLP
from text_generation_shard.engines.torch.model.linear import DenseLinear
from text_generation_shard.engines.torch.model.norm import HeadNorms, RMSNorm
from text_generation_shard.engines.torch.model.precision import Precision
from text_generation_shard.engines.torch.model.rope import RotaryEmbedding
from text_generation_shard.engines.torch.ops.device import DeviceOps
from text_generation_shard.engines.torch.ops.interface import Kernels, Ops, ResidualStream
from text_generation_shard.engines.torch.parallel.group import ParallelGroup


class LibraryMLP:
    """An MLP that the library computes."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def add(self, ops: Ops, stream: ResidualStream, before: RMSNorm, after: RMSNorm | None) -> None:
        normed = ops.norm(stream, before)
        output = self._module(normed.unsqueeze(0))
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        ops.add(stream, hidden.view(normed.shape), after)


@dataclass(frozen=True, slots=True)
class LibraryLayer:
    """Implements `DecoderLayer` with the weights of a layer of the library."""

    input_norm: RMSNorm
    qkv: DenseLinear
    head_norms: HeadNorms | None
    sinks: Tensor | None
    output: DenseLinear
    after_attention: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: LayerMLP
    after_mlp: RMSNorm | None
    after_norm: Sequence[DenseLinear]
    """The products of normed hidden states, without those inside a LibraryMLP."""
    shape: LayerShape
    scale: float = 1.0

    @property
    def qkv_width(self) -> int:
        return self.qkv.weight.shape[0]

    @property
    def norms(self) -> list[RMSNorm]:
        """The norms of hidden states."""
        return [
            each for each in (self.input_norm, self.after_attention, self.mlp_norm, self.after_mlp) if each is not None
        ]


@dataclass(frozen=True, slots=True)
class LibraryDecoder:
    """Implements `DecoderConfig` and `DecoderWeights` with the weights of a model of the library."""

    layers: Sequence[DecoderLayer]
    rotary: Sequence[RotaryEmbedding]
    embedding: Tensor
    embedding_scale: float
    norm: RMSNorm
    head: DenseLinear
    logits_divisor: float
    final_softcap: float | None
    attention_scale: float
    attention_softcap: float | None
    residual_scale: float
    max_sequence_length: int
    precision: Precision
    group: ParallelGroup
    """The ranks over which the weights are divided."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    def on(self, kernels: Kernels) -> Decoder:
        """Return the decoder of these weights."""
        return Decoder(self, self, DeviceOps(kernels, self.group, self.precision.model), self.group)
