"""The sizes of multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434) in a config.json."""

import math
from dataclasses import dataclass

from text_generation_shard.engines.torch.layers.rope import Rope
from text_generation_shard.json_object import JsonObject


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes of a head, and of the latent rows that all heads share; of a family, the defaults."""

    query_rank: int = 1536
    """Numbers that the queries of all heads are projected from; 0: from the hidden states."""
    rank: int = 512
    """Numbers that keys and values of all heads are projected from."""
    rotated: int = 64
    """Numbers of a query that are rotated, and of the key that all heads share for them."""
    plain: int = 128
    """Numbers of a query and of a key that are not rotated."""
    value: int = 128
    """Numbers of a value; 0: hidden_size / num_attention_heads."""

    def weights(self, hidden_size: int, heads: int) -> int:
        queries = heads * (self.plain + self.rotated)
        of_queries = self.query_rank * (hidden_size + queries) if self.query_rank else hidden_size * queries
        row = hidden_size * (self.rank + self.rotated)
        return of_queries + row + heads * (self.rank * (self.plain + self.value) + self.value * hidden_size)

    def scale(self, rope: Rope) -> float:
        """Return the factor of the products of query and key; yarn_apply_mscale in transformers."""
        correction = 1.0 + 0.1 * rope.mscale_all_dim * math.log(rope.factor)
        return correction**2 / math.sqrt(self.plain + self.rotated)


def read_latent(raw: JsonObject, default: LatentSizes | None, hidden_size: int, heads: int) -> LatentSizes | None:
    """Read the sizes of a config.json; None without latent attention. Raises EngineError with a one-line message."""
    if default is None:
        return None
    has_query_rank = not raw.is_null("q_lora_rank")
    if not has_query_rank and raw.flag("attention_bias", default=False):
        raise raw.unsupported("attention_bias without q_lora_rank is not supported")
    rotated = raw.count("qk_rope_head_dim", default.rotated)
    if rotated % 2:
        raise raw.error(f"qk_rope_head_dim {rotated} is odd, rotary embeddings need pairs")
    return LatentSizes(
        raw.count("q_lora_rank", default.query_rank) if has_query_rank else 0,
        raw.count("kv_lora_rank", default.rank),
        rotated,
        raw.count("qk_nope_head_dim", default.plain),
        hidden_size // heads
        if raw.is_null("v_head_dim")
        else raw.count("v_head_dim", default.value or hidden_size // heads),
    )


def with_multipliers(raw: JsonObject, hidden_size: int, num_layers: int) -> JsonObject:
    """Return the config with the multipliers that follow from those of MiniCPM 3; a null is without effect."""
    depth = 1.0 if raw.is_null("scale_depth") else raw.number("scale_depth", 1.4) / math.sqrt(num_layers)
    base = hidden_size if raw.is_null("dim_model_base") else raw.count("dim_model_base", 256)
    return raw.merged(
        {
            "embedding_multiplier": raw.number("scale_emb", 12.0),
            "residual_multiplier": depth,
            "logits_scaling": hidden_size / base,
        }
    )
