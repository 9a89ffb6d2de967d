"""Attention kernels for layers of different shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.attention.chunks import ChunkAttention
from text_generation_shard.engines.torch.cuda.step_plan import StepPlan
from text_generation_shard.engines.torch.huggingface.model import TransformersModel
from text_generation_shard.engines.torch.kernels.decode_attention import DecodeAttention, DecodeStep
from text_generation_shard.engines.torch.kernels.greedy import GreedySampler
from text_generation_shard.engines.torch.ops.triton import PlainKernels

Heads = tuple[int, int, int]
"""Query heads, KV heads, head_dim."""


class LayeredKernels(PlainKernels):
    """Implements `Kernels` for layers of different shapes. Holds the workspaces."""

    fused_tokens = 0

    def __init__(
        self, model: TransformersModel, vocab_size: int, max_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._chunks: dict[Heads, ChunkAttention] = {}
        self._decoding: dict[Heads, DecodeAttention] = {}
        for heads in dict.fromkeys((layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in model.layers):
            same = [
                (layer, rule)
                for layer, rule in zip(model.layers, model.rules, strict=True)
                if (layer.num_heads, layer.num_kv_heads, layer.head_dim) == heads
            ]
            if len({rule for _, rule in same}) > 1:
                raise EngineError(f"{model.architecture} scales attention by layer, which is not served on CUDA")
            windows = frozenset(layer.window for layer, _ in same)
            scale, softcap = same[0][1]
            self._chunks[heads] = ChunkAttention(*heads, windows, dtype, scale=scale, softcap=softcap)
            self._decoding[heads] = DecodeAttention(*heads, max_slots, device)
        self.sample_greedy = GreedySampler(max_slots, vocab_size, device).run

    def plan_chunks(self, plan: StepPlan, pages: Tensor) -> None:
        for chunks in self._chunks.values():
            chunks.plan(plan, pages)

    def chunk_attention(
        self, queries: Tensor, cache_layer: Tensor, window: int | None, out: Tensor, sinks: Tensor | None
    ) -> None:
        self._chunks[_heads(queries, cache_layer)].run(queries, cache_layer, window, out, sinks)

    def decode_attention(
        self,
        queries: Tensor,
        cache_layer: Tensor,
        step: DecodeStep,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        self._decoding[_heads(queries, cache_layer)].run(queries, cache_layer, step, window, out, sinks)


def _heads(queries: Tensor, cache_layer: Tensor) -> Heads:
    return queries.shape[1], cache_layer.shape[2], cache_layer.shape[4]
