"""The weights of a decoder, or of one rank's part of it, as the CUDA path computes with them.

Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053): a rank has some of the heads and some of the
MLP's inner values, so that each layer ends its two halves with a sum over the ranks. Norms and the embedding are on every
rank; the head's rows are divided, and the logits put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.cuda.fp8 import Fp8Linear, can_multiply
from text_generation_shard.engines.torch.cuda.linear import Head, Linear, Projection, Span
from text_generation_shard.engines.torch.cuda.precision import Precision
from text_generation_shard.engines.torch.cuda.split import Split
from text_generation_shard.engines.torch.model_config import ModelConfig
from text_generation_shard.engines.torch.weights import Part


class LayerWeights:
    """One layer: `qkv`, `output`, `gate_up` and `down`, each callable, and the weights of its norms."""

    def __init__(
        self, config: ModelConfig, index: int, split: Split, device: torch.device, precision: Precision
    ) -> None:
        self.window = config.windows[index]
        self._prefix = f"model.layers.{index}."
        self._config, self._device, self._precision = config, device, precision
        hidden = Span.whole(config.hidden_size)
        queries = _of_heads(split.even(config.num_heads, "attention heads"), config.head_dim)
        keys = _of_heads(split.kv_heads(config.num_kv_heads), config.head_dim)
        inner = split.even(config.intermediate_size, "inner values of the MLP")
        attention = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
        mlp = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
        self.qkv = self._linear([(name, rows, hidden) for name, rows in attention], bias=config.qkv_bias)
        self.gate_up = self._linear([(name, rows, hidden) for name, rows in mlp], bias=config.mlp_bias)
        # The ranks' outputs are added up, and each bias must be in the sum once.
        first = split.rank == 0
        self.output = self._linear([("self_attn.o_proj", hidden, queries)], bias=config.output_bias and first)
        self.down = self._linear([("mlp.down_proj", hidden, inner)], bias=config.mlp_bias and first)
        self.input_norm = torch.empty(config.hidden_size, device=device, dtype=precision.model)
        self.mlp_norm = torch.empty_like(self.input_norm)
        self.head_norms: tuple[Tensor, Tensor] | None = None
        """Weights [head_dim] of the norms of each query and of each key."""
        if config.query_key_norm:
            query_norm = torch.empty(config.head_dim, device=device, dtype=precision.model)
            self.head_norms = query_norm, torch.empty_like(query_norm)

    @property
    def linears(self) -> tuple[Linear | Fp8Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def targets(self) -> dict[str, Part | Tensor]:
        targets: dict[str, Part | Tensor] = {
            f"{self._prefix}input_layernorm.weight": self.input_norm,
            f"{self._prefix}post_attention_layernorm.weight": self.mlp_norm,
        }
        if self.head_norms is not None:
            names = (f"{self._prefix}self_attn.q_norm.weight", f"{self._prefix}self_attn.k_norm.weight")
            targets |= dict(zip(names, self.head_norms, strict=True))
        for linear in self.linears:
            targets |= linear.targets()
        return targets

    def seal(self) -> None:
        for linear in self.linears:
            linear.seal()

    def _linear(self, parts: Sequence[tuple[str, Span, Span]], *, bias: bool) -> Linear | Fp8Linear:
        projections = [Projection(f"{self._prefix}{name}", outputs, inputs) for name, outputs, inputs in parts]
        scheme = self._config.quantization
        if scheme is None or not can_multiply(projections, self._device):
            return Linear(projections, self._device, self._precision, bias=bias)
        covered = {scheme.covers(projection.name) for projection in projections}
        if len(covered) > 1:
            names = ", ".join(projection.name for projection in projections)
            raise EngineError(f"{names} are one product here: all of them must be in FP8, or none")
        if covered == {False}:
            return Linear(projections, self._device, self._precision, bias=bias)
        return Fp8Linear(projections, scheme, self._device, self._precision.model, bias=bias)


class ModelWeights:
    """All weights of a rank. Made empty; `targets` says where they come from, `seal` readies them once they are there."""

    def __init__(self, config: ModelConfig, split: Split, device: torch.device, dtype: torch.dtype) -> None:
        self.num_heads = split.even(config.num_heads, "attention heads").length
        self.num_kv_heads = split.kv_heads(config.num_kv_heads).length
        self.precision = Precision.of(config, dtype)
        """Final once the weights are sealed."""
        self.layers = [LayerWeights(config, index, split, device, self.precision) for index in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, device=device, dtype=dtype)
        self._vocabulary = split.padded(config.vocab_size)
        rows = -(-config.vocab_size // split.size)
        # Rows of padding are zero, and so are their logits: whoever puts the ranks' logits together leaves them out.
        table = torch.zeros(rows * split.size, config.hidden_size, device=device, dtype=dtype)
        self.embedding = table[: config.vocab_size]
        self.tied = config.tie_word_embeddings
        mine = slice(split.rank * rows, (split.rank + 1) * rows)
        self.head = Head(table[mine] if self.tied else torch.zeros_like(table[mine]))

    def targets(self) -> dict[str, Part | Tensor]:
        """What to fill, by its name in the checkpoint."""
        targets: dict[str, Part | Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm,
        }
        mine = self._vocabulary
        if not self.tied and mine.length:
            shape = (mine.total, self.embedding.shape[1])
            targets["lm_head.weight"] = Part(self.head.weight[: mine.length], shape, (mine.start, 0))
        for layer in self.layers:
            targets |= layer.targets()
        return targets

    @property
    def linears(self) -> Iterator[Linear | Fp8Linear]:
        """Of all layers."""
        for layer in self.layers:
            yield from layer.linears

    def seal(self) -> None:
        """Ready the loaded weights for use. What a tied head has in another dtype than the embedding is a copy of its own."""
        for layer in self.layers:
            layer.seal()
        norms = [self.norm, *(norm for layer in self.layers for norm in (layer.input_norm, layer.mlp_norm))]
        after_norms = [self.head, *(linear for layer in self.layers for linear in (layer.qkv, layer.gate_up))]
        sealed = self.precision.sealed(norms, [each.weight for each in after_norms])
        if sealed != self.precision:
            self.precision = sealed
            for each in after_norms:
                each.weight = each.weight.to(sealed.normed)


def _of_heads(heads: Span, head_dim: int) -> Span:
    return Span(heads.start * head_dim, heads.length * head_dim, heads.total * head_dim)
