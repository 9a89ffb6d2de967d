"""The families of decoders with multi-head latent attention, by config.json's model_type."""

from __future__ import annotations

from dataclasses import replace

from text_generation_shard.engines.torch.models.native.expert_families import DENSE, SIGMOID_EXPERTS, SOFTMAX_EXPERTS
from text_generation_shard.engines.torch.models.native.family import ATTENTION_BIAS, Family
from text_generation_shard.engines.torch.models.native.latent_config import LatentSizes
from text_generation_shard.engines.torch.models.native.prediction_config import NEXTN

DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    qkv_bias=ATTENTION_BIAS,
    output_bias=ATTENTION_BIAS,
    interleaved_rotary=True,
    latent=LatentSizes(),
    experts=SIGMOID_EXPERTS,
    prediction=NEXTN,
)
MISTRAL4_ROPE = (
    ("rope_type", "yarn"),
    ("factor", 128.0),
    ("original_max_position_embeddings", 8192),
    ("mscale", 1.0),
    ("mscale_all_dim", 1.0),
    ("llama_4_scaling_beta", 0.1),
)

LATENT_FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "deepseek_v2": replace(
        DEEPSEEK_V3,
        architecture="DeepseekV2ForCausalLM",
        experts=replace(SOFTMAX_EXPERTS, count=64, each=0, inner=1407, shared_count=2, normalize=False, group_best=1),
        unsupported=(("mlp_bias", 0),),
    ),
    "glm4_moe_lite": replace(
        DEEPSEEK_V3,
        architecture="Glm4MoeLiteForCausalLM",
        rms_norm_eps=1e-5,
        latent=LatentSizes(query_rank=768, plain=192, value=256),
        experts=replace(
            SIGMOID_EXPERTS, count=64, each=4, inner=1536, dense_layers=(DENSE, 1), scale=1.8, groups=(1, 1)
        ),
    ),
    "mistral4": replace(
        DEEPSEEK_V3,
        architecture="Mistral4ForCausalLM",
        partial_rotary=0.5,
        rope=MISTRAL4_ROPE,
        latent=LatentSizes(query_rank=1024, rank=256, plain=64),
        experts=replace(SOFTMAX_EXPERTS, count=128, each=4),
    ),
    "youtu": replace(DEEPSEEK_V3, architecture="YoutuForCausalLM", tie_word_embeddings=True, experts=None),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM",
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        multipliers=True,
        depth_multipliers=True,
        latent=LatentSizes(query_rank=768, rank=256, rotated=32, plain=64, value=0),
        unsupported=(("mlp_bias", 0),),
    ),
}
