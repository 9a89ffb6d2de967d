"""A Llama-family decoder, shaped by its config: Llama, Mistral, Qwen2, Qwen3.

Computes the same as transformers' LlamaDecoderLayer and its variants, on a flat batch of tokens. The query, key and value
projections are fused into one product, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.attention.paged import AttentionPlan
from text_generation_shard.engines.torch.cpu.batch import StepBatch
from text_generation_shard.engines.torch.kv_cache import PagedKVCache
from text_generation_shard.engines.torch.model.config import ModelConfig
from text_generation_shard.engines.torch.model.layers import CpuLinear, RotaryEmbedding

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class _Layer:
    """Weights of one layer; `named_parameters` returns the parts of fused weights under their checkpoint names."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        self._qkv_sizes = (query_size, kv_size, kv_size)
        self.qkv = CpuLinear(query_size + 2 * kv_size, hidden, device, dtype, bias=config.qkv_bias)
        self.output = CpuLinear(hidden, query_size, device, dtype, bias=config.output_bias)
        self.gate_up = CpuLinear(2 * inner, hidden, device, dtype, bias=config.mlp_bias)
        self.down = CpuLinear(hidden, inner, device, dtype, bias=config.mlp_bias)
        self.input_norm = torch.empty(hidden, device=device, dtype=dtype)
        self.mlp_norm = torch.empty(hidden, device=device, dtype=dtype)
        self.query_norm = self.key_norm = self.head_norms = None
        if config.query_key_norm:
            # One weight row per query and key head, so that all heads are normed at once.
            self.head_norms = torch.empty(
                config.num_heads + config.num_kv_heads, config.head_dim, device=device, dtype=dtype
            )
            self.query_norm = torch.empty(config.head_dim, device=device, dtype=dtype)
            self.key_norm = torch.empty(config.head_dim, device=device, dtype=dtype)
        self._num_heads = config.num_heads

    def named_parameters(self) -> dict[str, Tensor]:
        parameters = {"input_layernorm.weight": self.input_norm, "post_attention_layernorm.weight": self.mlp_norm}
        if self.query_norm is not None and self.key_norm is not None:
            parameters |= {"self_attn.q_norm.weight": self.query_norm, "self_attn.k_norm.weight": self.key_norm}
        parameters |= _parts(self.qkv, self._qkv_sizes, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        inner = self.gate_up.weight.shape[0] // 2
        parameters |= _parts(self.gate_up, (inner, inner), "mlp.gate_proj", "mlp.up_proj")
        hidden = self.down.weight.shape[0]
        parameters |= _parts(self.output, (hidden,), "self_attn.o_proj")
        return parameters | _parts(self.down, (hidden,), "mlp.down_proj")

    def process_weights_after_loading(self) -> None:
        if self.head_norms is not None and self.query_norm is not None and self.key_norm is not None:
            self.head_norms[: self._num_heads] = self.query_norm
            self.head_norms[self._num_heads :] = self.key_norm
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            linear.process_weights_after_loading()


class Decoder:
    """The model. Created empty: fill `named_parameters`, then call `process_weights_after_loading`."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._activation = ACTIVATIONS[config.activation]
        self._rope = RotaryEmbedding(config.rope, config.head_dim, device, dtype)
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self._layers = [_Layer(config, device, dtype) for _ in range(config.num_layers)]
        self._norm = torch.empty(config.hidden_size, device=device, dtype=dtype)
        self._head = CpuLinear(config.vocab_size, config.hidden_size, device, dtype)
        if config.tie_word_embeddings:
            self._head.weight = self._embedding

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the tensors to fill, by checkpoint name."""
        parameters = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not self._config.tie_word_embeddings:
            parameters["lm_head.weight"] = self._head.weight
        for index, layer in enumerate(self._layers):
            parameters |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.named_parameters().items()}
        return parameters

    def process_weights_after_loading(self) -> None:
        """Prepare the loaded weights for use; `named_parameters` is no longer valid."""
        for layer in self._layers:
            layer.process_weights_after_loading()
        self._head.process_weights_after_loading()

    def forward(self, batch: StepBatch, plan: AttentionPlan, cache: PagedKVCache) -> Tensor:
        """Return hidden states [tokens, hidden] after the last layer; writes the tokens' keys and values to the cache."""
        hidden = functional.embedding(batch.token_ids, self._embedding)
        rotation = self._rope.factors(batch.positions)
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(hidden, layer.input_norm)
            hidden += self._attend(layer, index, normed, rotation, batch, plan, cache)
            normed = self._rms_norm(hidden, layer.mlp_norm)
            hidden += self._mlp(layer, normed)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, vocabulary] for some rows of the output of `forward`."""
        return self._head(self._rms_norm(hidden, self._norm))

    def _attend(
        self,
        layer: _Layer,
        index: int,
        normed: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: StepBatch,
        plan: AttentionPlan,
        cache: PagedKVCache,
    ) -> Tensor:
        heads, kv_heads, head_dim = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim
        qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, head_dim)
        rotated = qkv[:, : heads + kv_heads]
        if layer.head_norms is not None:
            rotated.copy_(functional.rms_norm(rotated, (head_dim,), None, self._config.rms_norm_eps) * layer.head_norms)
        self._rope.rotate(rotated, rotation)
        cache.write(index, batch.write_index, qkv[:, heads:])
        return layer.output(plan.attend(qkv[:, :heads], index, head_dim**-0.5))

    def _mlp(self, layer: _Layer, normed: Tensor) -> Tensor:
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        return layer.down(self._activation(gate).mul_(up))

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_eps)


def _parts(linear: CpuLinear, sizes: tuple[int, ...], *names: str) -> dict[str, Tensor]:
    """Return views of the rows of a fused projection, under the names of the original projections."""
    parts = dict(zip((f"{name}.weight" for name in names), torch.split(linear.weight, list(sizes)), strict=True))
    if linear.bias is not None:
        parts |= dict(zip((f"{name}.bias" for name in names), torch.split(linear.bias, list(sizes)), strict=True))
    return parts
