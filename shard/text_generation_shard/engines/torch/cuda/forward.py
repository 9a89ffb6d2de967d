"""The decoder on a GPU: matrix products of cuBLAS, and between them the kernels of the toolbox.

The residual stream is float32: rounded to bfloat16 after each layer it alone costs as much precision as all products
together. What a layer adds to it is added by the norm that reads it next.

A forward pass is cut where there is attention, of which the host may have to know the step:

    piece 0 · attention of layer 0 · piece 1 · attention of layer 1 · … · the last piece

A piece is all that is computed from one attention to the next, and hangs on nothing but what lies on the device: it can be
captured in a CUDA graph whatever the step, and replayed with any other of as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.cuda.fp8 import Fp8Linear
from text_generation_shard.engines.torch.cuda.kernels.decode_attention import DecodeStep
from text_generation_shard.engines.torch.cuda.kernels.rope import RopeStep, rotary_table
from text_generation_shard.engines.torch.cuda.layers import LayerWeights, ModelWeights
from text_generation_shard.engines.torch.cuda.linear import Linear
from text_generation_shard.engines.torch.cuda.parallel.group import Group
from text_generation_shard.engines.torch.cuda.toolbox import Toolbox
from text_generation_shard.engines.torch.model_config import ModelConfig
from text_generation_shard.engines.torch.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step's tokens, on the device."""

    columns: Tensor
    """int32 [3, tokens]: ids, positions and slots; see `step_plan`."""
    decoding: int
    """Tokens of decoding rows; they come first."""

    @property
    def tokens(self) -> int:
        return self.columns.shape[1]


@dataclass(frozen=True, slots=True)
class Activations:
    """What one piece of a forward pass hands to the next, by way of attention."""

    residual: Tensor
    """float32 [tokens, hidden]."""
    normed: Tensor
    """[tokens, hidden]: in the end, the normed hidden states after the last layer."""
    qkv: Tensor
    """[tokens, (num_heads + 2·num_kv_heads)·head_dim]: the fused projection."""
    queries: Tensor
    """[tokens, num_heads·head_dim]: rotated, and in place of those of `qkv` if these have no more bits."""
    attended: Tensor
    """[tokens, num_heads·head_dim]: what attention makes of it."""

    def first(self, tokens: int) -> Activations:
        """The same memory, for as many tokens."""
        return Activations(
            self.residual[:tokens],
            self.normed[:tokens],
            self.qkv[:tokens],
            self.queries[:tokens],
            self.attended[:tokens],
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass: its tokens, the layers' cache, and the memory that it is computed in."""

    ids: Tensor
    rope: RopeStep
    cache: Sequence[Tensor]
    activations: Activations


class Forward:
    """Runs the decoder of one rank. `block_tables` and `last_tokens` have a row for each slot and one for the dummy."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        toolbox: Toolbox,
        group: Group,
        block_tables: Tensor,
        last_tokens: Tensor,
    ) -> None:
        self._config = config
        self._weights = weights
        self._tools = toolbox
        self._group = group
        self._block_tables = block_tables
        self._last_tokens = last_tokens
        self._device = block_tables.device
        frequencies, scale = inverse_frequencies(config.rope, config.head_dim)
        self._rotary = rotary_table(frequencies, scale, config.max_sequence_length, self._device)
        self._scale = config.head_dim**-0.5
        self._windows = [layer.window for layer in weights.layers]
        can_fuse = all(isinstance(linear, Linear) for linear in weights.linears)
        self._fused_tokens = toolbox.fused_tokens if can_fuse else 0
        self.num_pieces = len(weights.layers) + 1

    def __call__(self, step: DeviceStep, cache: Sequence[Tensor]) -> Tensor:
        """Normed hidden states [tokens, hidden] after the last layer; leaves keys and values in the layers' `cache`."""
        activations = self.activations(step.tokens)
        work = self.begin(step.columns, cache, activations)
        attend = self.attention(work, step.tokens, step.decoding)
        if step.tokens <= self._fused_tokens:
            self._fused_layers(work, attend)
        else:
            self.piece(0, work)
            for index in range(1, self.num_pieces):
                attend(index - 1)
                self.piece(index, work)
        return activations.normed

    def activations(self, tokens: int) -> Activations:
        """Memory for a pass of so many tokens, with whatever is in it."""
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

    def begin(self, columns: Tensor, cache: Sequence[Tensor], activations: Activations) -> Pass:
        """A pass over the tokens of `columns`, as a step has them, in `activations` for as many; computes nothing yet."""
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
        return Pass(ids, rope, cache, activations)

    def piece(self, index: int, work: Pass) -> None:
        """What comes between the attention of layer `index` - 1 and that of layer `index`, for all tokens of `work`.

        Piece 0 begins with the embedding, the last of `num_pieces` ends with `normed`; the others leave rotated queries, and
        keys and values in the cache.
        """
        layers, activations = self._weights.layers, work.activations
        update: Tensor | None = None
        if index:
            update = self._finish(layers[index - 1], activations)
        else:
            self._embed(work)
        is_last = index == len(layers)
        norm = self._weights.norm if is_last else layers[index].input_norm
        self._norm(update, activations.residual, norm, activations.normed)
        if not is_last:
            layers[index].qkv(activations.normed, activations.qkv)
            self._rotate(index, work)

    def attention(self, work: Pass, tokens: int, decoding: int) -> Callable[[int], None]:
        """Computes the attention of the layer of a given number: for the first `tokens` of a pass, those of `decoding` rows
        and those of the chunks that were planned, and for none that pad it.

        All that does not change from layer to layer is found beforehand.
        """
        tools, cache, windows = self._tools, work.cache, self._windows
        queries = work.activations.queries[:tokens].view(tokens, -1, self._config.head_dim)
        out = work.activations.attended[:tokens]
        row_queries, chunk_queries = queries[:decoding], queries[decoding:]
        row_out, chunk_out = out[:decoding], out[decoding:]
        rows = DecodeStep(work.rope.positions[:decoding], work.rope.slots[:decoding], self._block_tables, self._scale)

        def attend(layer: int) -> None:
            if decoding:
                tools.decode_attention(row_queries, cache[layer], rows, windows[layer], row_out)
            if decoding < tokens:
                tools.chunk_attention(chunk_queries, cache[layer], windows[layer], chunk_out)

        return attend

    def logits(self, normed: Tensor, memory: Tensor | None = None) -> Tensor:
        """float32 [rows, vocabulary] for some rows of what the call gave; the same on every rank.

        In the first rows of `memory`, if that is given: see `logits_memory`.
        """
        rows, size = normed.shape[0], self._group.place.size
        if memory is None:
            memory = self.logits_memory(rows)
        if size == 1:
            return self._weights.head.logits(normed, memory[:rows])
        self._group.all_gather_last_dim(self._weights.head.logits(normed), memory[:rows])
        return memory[:rows, : self._config.vocab_size]

    def logits_memory(self, rows: int) -> Tensor:
        """Room for the logits of so many rows."""
        width = self._group.place.size * self._weights.head.weight.shape[0]
        return torch.empty(rows, width, dtype=torch.float32, device=self._device)

    def _embed(self, work: Pass) -> None:
        self._tools.embed(
            work.ids, work.rope.slots, self._last_tokens, self._weights.embedding, work.activations.residual
        )

    def _rotate(self, index: int, work: Pass) -> None:
        head_norms, activations = self._weights.layers[index].head_norms, work.activations
        self._tools.rotate_and_append(activations.qkv, activations.queries, work.rope, work.cache[index], head_norms)

    def _finish(self, layer: LayerWeights, activations: Activations) -> Tensor:
        """A layer after its attention; what is to be added to the residual stream yet."""
        residual, normed = activations.residual, activations.normed
        self._norm(self._summed(layer.output(activations.attended)), residual, layer.mlp_norm, normed)
        gate_up = layer.gate_up(normed)
        inner = activations.attended.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._tools.activate(gate_up, self._config.activation, inner)
        return self._summed(layer.down(inner))

    def _fused_layers(self, work: Pass, attend: Callable[[int], None]) -> None:
        """All pieces for a few tokens: each product with what comes before and after it in one kernel."""
        tools, eps, activations = self._tools, self._config.rms_norm_eps, work.activations
        residual = activations.residual
        self._embed(work)
        for index, layer in enumerate(self._weights.layers):
            tools.norm_matvec(residual, layer.input_norm, eps, layer.qkv.weight, activations.qkv, layer.qkv.bias)
            self._rotate(index, work)
            attend(index)
            self._add_product(activations.attended, layer.output, residual)
            inner = activations.attended.new_empty(residual.shape[0], layer.gate_up.weight.shape[0] // 2)
            tools.norm_matvec_activate(
                residual,
                layer.mlp_norm,
                eps,
                layer.gate_up.weight,
                self._config.activation,
                inner,
                layer.gate_up.bias,
            )
            self._add_product(inner, layer.down, residual)
        tools.rms_norm(residual, self._weights.norm, eps, activations.normed)

    def _add_product(self, x: Tensor, linear: Linear | Fp8Linear, residual: Tensor) -> None:
        """residual += x · weightᵀ, summed over the ranks: the residual stream itself is rank 0's share of the sum."""
        if self._group.place.rank == 0:
            self._tools.matvec_add(x, linear.weight, residual, linear.bias)
        else:
            self._tools.matvec(x, linear.weight, residual, linear.bias)
        self._group.all_reduce(residual)

    def _norm(self, update: Tensor | None, residual: Tensor, weight: Tensor, out: Tensor) -> None:
        if update is None:
            self._tools.rms_norm(residual, weight, self._config.rms_norm_eps, out)
        else:
            self._tools.add_rms_norm(update, residual, weight, self._config.rms_norm_eps, out)

    def _summed(self, part: Tensor) -> Tensor:
        self._group.all_reduce(part)
        return part
