"""The GPU implementation of `Kernels`: our Triton kernels, and FlashInfer for prompt chunks."""

from __future__ import annotations

from text_generation_shard.engines.torch.attention.chunks import ChunkAttention
from text_generation_shard.engines.torch.kernels.activation import activate
from text_generation_shard.engines.torch.kernels.decode_attention import DecodeAttention
from text_generation_shard.engines.torch.kernels.embedding import embed
from text_generation_shard.engines.torch.kernels.experts import experts
from text_generation_shard.engines.torch.kernels.greedy import GreedySampler
from text_generation_shard.engines.torch.kernels.matvec import (
    MAX_ROWS,
    matvec,
    matvec_add,
    norm_matvec,
    norm_matvec_activate,
)
from text_generation_shard.engines.torch.kernels.norm import add_rms_norm, rms_norm
from text_generation_shard.engines.torch.kernels.rope import rotate_and_append
from text_generation_shard.engines.torch.kernels.rotate import append
from text_generation_shard.engines.torch.kernels.routing import route
from text_generation_shard.engines.torch.kernels.tables import update_tables
from text_generation_shard.engines.torch.kv_cache import CacheShape
from text_generation_shard.engines.torch.model.config import ModelConfig
from text_generation_shard.engines.torch.model.precision import MAX_NARROW_HIDDEN_SIZE


class PlainKernels:
    """The kernels without a workspace."""

    update_tables = staticmethod(update_tables)
    embed = staticmethod(embed)
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    rotate_and_append = staticmethod(rotate_and_append)
    append = staticmethod(append)
    activate = staticmethod(activate)
    norm_matvec = staticmethod(norm_matvec)
    norm_matvec_activate = staticmethod(norm_matvec_activate)
    matvec = staticmethod(matvec)
    matvec_add = staticmethod(matvec_add)
    route = staticmethod(route)
    experts = staticmethod(experts)


class TritonKernels(PlainKernels):
    """Implements `Kernels` for layers of one shape. Holds the workspaces."""

    def __init__(self, config: ModelConfig, shape: CacheShape, max_slots: int) -> None:
        heads = (shape.layers[0].num_heads, shape.layers[0].num_kv_heads, config.head_dim)
        # Measured on an H200: wide products beat cuBLAS only at one row, narrow ones, where launches dominate, at a few.
        self.fused_tokens = MAX_ROWS if config.hidden_size <= MAX_NARROW_HIDDEN_SIZE else 1
        self._chunks = ChunkAttention(
            *heads,
            frozenset(config.windows),
            shape.dtype,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
        )
        self.plan_chunks = self._chunks.plan
        self.chunk_attention = self._chunks.run
        self.decode_attention = DecodeAttention(*heads, max_slots, shape.device).run
        self.sample_greedy = GreedySampler(max_slots, config.vocab_size, shape.device).run
