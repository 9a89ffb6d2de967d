"""The decoder on a GPU: matrix products of cuBLAS, and the kernels of `Ops` between them.

The residual stream is float32: rounding it to bfloat16 after each layer alone would cost as much precision as all products
together. The output of a layer is added to it by the norm that reads it next.

A forward pass is divided at attention, because the host plans attention for each step:

    piece 0 · attention of layer 0 · piece 1 · attention of layer 1 · … · last piece

A piece is everything between two attentions. It depends only on data on the device, so it can be captured in a CUDA graph and
replayed for any other step with the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.decode_attention import DecodeStep
from text_generation_shard.engines.torch.kernels.rope import RopeStep, rotary_table
from text_generation_shard.engines.torch.model.config import ModelConfig
from text_generation_shard.engines.torch.model.layers import inverse_frequencies
from text_generation_shard.engines.torch.model.linear import ParallelLinear
from text_generation_shard.engines.torch.model.parameters import LayerWeights, ModelWeights
from text_generation_shard.engines.torch.ops.interface import Ops
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.quantization.fp8 import Fp8Linear


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The tokens of a step on the device."""

    columns: Tensor
    """int32 [3, tokens]: ids, positions and slots; see `step_plan`."""
    num_decoding: int
    """Number of tokens of decode rows; they come first."""

    @property
    def tokens(self) -> int:
        return self.columns.shape[1]


@dataclass(frozen=True, slots=True)
class Activations:
    """Buffers that pass activations between pieces and attention."""

    residual: Tensor
    """float32 [tokens, hidden]."""
    normed: Tensor
    """[tokens, hidden]: after the last piece, the normed output of the last layer."""
    qkv: Tensor
    """[tokens, (num_heads + 2·num_kv_heads)·head_dim]: output of the fused projection."""
    queries: Tensor
    """[tokens, num_heads·head_dim]: rotated queries; a view of `qkv` if both have the same dtype."""
    attended: Tensor
    """[tokens, num_heads·head_dim]: output of attention."""

    def first(self, tokens: int) -> Activations:
        """Return views of the first `tokens` rows."""
        return Activations(
            self.residual[:tokens],
            self.normed[:tokens],
            self.qkv[:tokens],
            self.queries[:tokens],
            self.attended[:tokens],
        )


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A forward pass: its tokens, the KV cache of the layers, and its activation buffers."""

    ids: Tensor
    rope: RopeStep
    cache: Sequence[Tensor]
    activations: Activations


class Forward:
    """Runs the decoder of one rank. `block_tables` and `last_tokens` have a row for each slot and one for the dummy slot."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        group: ParallelGroup,
        block_tables: Tensor,
        last_tokens: Tensor,
    ) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._group = group
        self._block_tables = block_tables
        self._last_tokens = last_tokens
        self._device = block_tables.device
        frequencies, scale = inverse_frequencies(config.rope, config.head_dim)
        self._rotary = rotary_table(frequencies, scale, config.max_sequence_length, self._device)
        self._scale = config.head_dim**-0.5
        self._windows = [layer.window for layer in weights.layers]
        can_fuse = all(isinstance(linear, ParallelLinear) for linear in weights.linears)
        self._fused_tokens = ops.fused_tokens if can_fuse else 0
        self.num_pieces = len(weights.layers) + 1

    def __call__(self, step: DeviceStep, cache: Sequence[Tensor]) -> Tensor:
        """Return normed hidden states [tokens, hidden] after the last layer; writes keys and values to `cache`."""
        activations = self.activations(step.tokens)
        state = self.prepare(step.columns, cache, activations)
        attend = self.attention(state, step.tokens, step.num_decoding)
        if step.tokens <= self._fused_tokens:
            self._fused_layers(state, attend)
        else:
            self.piece(0, state)
            for index in range(1, self.num_pieces):
                attend(index - 1)
                self.piece(index, state)
        return activations.normed

    def activations(self, tokens: int) -> Activations:
        """Allocate uninitialized buffers for a pass of `tokens` tokens."""
        weights, hidden, head_dim = self._weights, self._config.hidden_size, self._config.head_dim
        queries, precision = weights.num_heads * head_dim, weights.precision

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(tokens, width, dtype=dtype, device=self._device)

        qkv = empty(queries + 2 * weights.num_kv_heads * head_dim, precision.products)
        return Activations(
            residual=empty(hidden, torch.float32),
            normed=empty(hidden, precision.normed),
            qkv=qkv,
            queries=qkv[:, :queries] if qkv.dtype == precision.model else empty(queries, precision.model),
            attended=empty(queries, precision.model),
        )

    def prepare(self, columns: Tensor, cache: Sequence[Tensor], activations: Activations) -> ForwardPass:
        """Prepare a pass over the tokens of `columns` with buffers for as many tokens; computes nothing."""
        ids, positions, slots = columns.unbind()
        rope = RopeStep(
            positions,
            slots,
            self._block_tables,
            self._rotary,
            self._weights.num_heads,
            self._weights.num_kv_heads,
            self._config.head_dim,
            self._config.rms_norm_eps,
        )
        return ForwardPass(ids, rope, cache, activations)

    def piece(self, index: int, state: ForwardPass) -> None:
        """Compute everything between the attention of layer `index` - 1 and that of layer `index`, for all tokens.

        Piece 0 starts with the embedding, the last of `num_pieces` ends with `normed`. The others end with the rotated
        queries and with keys and values in the cache.
        """
        layers, activations = self._weights.layers, state.activations
        update: Tensor | None = None
        if index:
            update = self._after_attention(layers[index - 1], activations)
        else:
            self._embed(state)
        is_last = index == len(layers)
        norm = self._weights.norm if is_last else layers[index].input_norm
        self._norm(update, activations.residual, norm, activations.normed)
        if not is_last:
            layers[index].qkv(activations.normed, activations.qkv)
            self._rotate(index, state)

    def attention(self, state: ForwardPass, tokens: int, num_decoding: int) -> Callable[[int], None]:
        """Return a function that computes the attention of the layer with a given number.

        It covers the first `tokens` tokens of a pass, those of `num_decoding` decode rows and of the planned chunks, without the padding.
        Everything that is the same in all layers is computed beforehand.
        """
        ops, cache, windows = self._ops, state.cache, self._windows
        queries = state.activations.queries[:tokens].view(tokens, -1, self._config.head_dim)
        out = state.activations.attended[:tokens]
        row_queries, chunk_queries = queries[:num_decoding], queries[num_decoding:]
        row_out, chunk_out = out[:num_decoding], out[num_decoding:]
        rows = DecodeStep(
            state.rope.positions[:num_decoding], state.rope.slots[:num_decoding], self._block_tables, self._scale
        )

        def attend(layer: int) -> None:
            if num_decoding:
                ops.decode_attention(row_queries, cache[layer], rows, windows[layer], row_out)
            if num_decoding < tokens:
                ops.chunk_attention(chunk_queries, cache[layer], windows[layer], chunk_out)

        return attend

    def logits(self, normed: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return logits, float32 [rows, vocabulary], for some rows of the hidden states; the same on every rank.

        Written to the first rows of `memory` if given: see `logits_memory`.
        """
        rows, size = normed.shape[0], self._group.tp.world_size
        if memory is None:
            memory = self.logits_memory(rows)
        if size == 1:
            return self._weights.head.logits(normed, memory[:rows])
        self._group.all_gather_last_dim(self._weights.head.logits(normed), memory[:rows])
        return memory[:rows, : self._config.vocab_size]

    def logits_memory(self, rows: int) -> Tensor:
        """Allocate a buffer for the logits of `rows` rows."""
        width = self._group.tp.world_size * self._weights.head.weight.shape[0]
        return torch.empty(rows, width, dtype=torch.float32, device=self._device)

    def _embed(self, state: ForwardPass) -> None:
        self._ops.embed(
            state.ids, state.rope.slots, self._last_tokens, self._weights.embedding, state.activations.residual
        )

    def _rotate(self, index: int, state: ForwardPass) -> None:
        head_norms, activations = self._weights.layers[index].head_norms, state.activations
        self._ops.rotate_and_append(activations.qkv, activations.queries, state.rope, state.cache[index], head_norms)

    def _after_attention(self, layer: LayerWeights, activations: Activations) -> Tensor:
        """Compute a layer after its attention; returns the update that is still to be added to the residual stream."""
        residual, normed = activations.residual, activations.normed
        self._norm(self._all_reduced(layer.output(activations.attended)), residual, layer.mlp_norm, normed)
        gate_up = layer.gate_up(normed)
        inner = activations.attended.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._ops.activate(gate_up, self._config.activation, inner)
        return self._all_reduced(layer.down(inner))

    def _fused_layers(self, state: ForwardPass, attend: Callable[[int], None]) -> None:
        """Compute all layers for a few tokens: each product is one kernel with the operations before and after it."""
        ops, eps, activations = self._ops, self._config.rms_norm_eps, state.activations
        residual = activations.residual
        self._embed(state)
        for index, layer in enumerate(self._weights.layers):
            ops.norm_matvec(residual, layer.input_norm, eps, layer.qkv.weight, activations.qkv, layer.qkv.bias)
            self._rotate(index, state)
            attend(index)
            self._add_product(activations.attended, layer.output, residual)
            inner = activations.attended.new_empty(residual.shape[0], layer.gate_up.weight.shape[0] // 2)
            ops.norm_matvec_activate(
                residual,
                layer.mlp_norm,
                eps,
                layer.gate_up.weight,
                self._config.activation,
                inner,
                layer.gate_up.bias,
            )
            self._add_product(inner, layer.down, residual)
        ops.rms_norm(residual, self._weights.norm, eps, activations.normed)

    def _add_product(self, x: Tensor, linear: ParallelLinear | Fp8Linear, residual: Tensor) -> None:
        """residual += x · weightᵀ, summed over the ranks: the residual stream itself is part of rank 0's summand."""
        if self._group.tp.rank == 0:
            self._ops.matvec_add(x, linear.weight, residual, linear.bias)
        else:
            self._ops.matvec(x, linear.weight, residual, linear.bias)
        self._group.all_reduce(residual)

    def _norm(self, update: Tensor | None, residual: Tensor, weight: Tensor, out: Tensor) -> None:
        if update is None:
            self._ops.rms_norm(residual, weight, self._config.rms_norm_eps, out)
        else:
            self._ops.add_rms_norm(update, residual, weight, self._config.rms_norm_eps, out)

    def _all_reduced(self, part: Tensor) -> Tensor:
        self._group.all_reduce(part)
        return part
