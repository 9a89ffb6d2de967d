"""Tiny configs of the families that the torch engine computes itself, and of their switches."""

from __future__ import annotations

import copy
from typing import Any

import transformers
from state_families import VISION, state_configs

LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
"""Sizes of latent attention."""

GPU_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
"""The shape of models that GPU kernels compute in bfloat16, with heads of 64."""

MODELS = {
    "llama": "Llama 1 to 3, SmolLM2, Vicuna, Yi, TinyLlama",
    "mistral": "Mistral 7B, Nemo, Small 3, Codestral, Devstral, Magistral",
    "ministral": "Ministral 8B",
    "ministral3": "Ministral 3",
    "mimo": "MiMo 7B",
    "qwen2": "Qwen 1.5 to 2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    "qwen3": "Qwen3",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 270M and 1B",
    "gemma4_text": "Gemma 4 26B-A4B and 31B",
    "phi3": "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    "granite": "Granite 3",
    "glm": "GLM-4-9B, GLM-Edge",
    "glm4": "GLM-4-0414",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "mixtral": "Mixtral",
    "qwen2_vl_text": "Qwen2-VL",
    "qwen2_5_vl_text": "Qwen2.5-VL",
    "qwen3_vl_text": "Qwen3-VL dense",
    "qwen3_vl_moe_text": "Qwen3-VL MoE",
    "glm4v_text": "GLM-4.1V, GLM-4.6V-Flash",
    "glm4v_moe_text": "GLM-4.5V, GLM-4.6V",
    "glm4_moe": "GLM-4.5 to 4.7",
    "qwen2_moe": "Qwen 1.5-MoE, Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE, Qwen3-Coder",
    "gpt_oss": "gpt-oss",
    "qwen3_5_text": "Qwen3.5 to 3.8 dense",
    "qwen3_5_moe_text": "Qwen3.5 to 3.8 MoE",
    "qwen3_next": "Qwen3-Next, Qwen3-Coder-Next",
    "granitemoehybrid": "Granite 4",
    "olmo_hybrid": "OLMo Hybrid",
    "bamba": "Bamba",
    "falcon_h1": "Falcon-H1",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano",
    "lfm2": "LFM2, LFM2.5",
    "lfm2_moe": "LFM2-8B-A1B",
    "deepseek_v2": "DeepSeek V2, V2-Lite",
    "deepseek_v3": "DeepSeek V3, R1, Moonlight",
    "kimi_k2": "Kimi K2",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "mistral4": "Mistral Small 4",
    "minicpm3": "MiniCPM3-4B",
    "youtu": "Youtu-LLM-2B",
}
"""The models that people know of each family, for docs/models.md."""
VISION_MODELS = {
    "gemma3": "Gemma 3 4B to 27B",
    "gemma4": "Gemma 4",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL dense",
    "qwen3_vl_moe": "Qwen3-VL MoE",
    "qwen3_5": "Qwen3.5 to 3.8 dense",
    "qwen3_5_moe": "Qwen3.5 to 3.8 MoE",
    "glm4v": "GLM-4.1V",
    "glm46v": "GLM-4.6V-Flash",
    "glm4v_moe": "GLM-4.5V, GLM-4.6V",
    "mistral3": "Mistral Small 3.1 and 3.2, Ministral 3, Devstral Small",
    "llava": "Llava 1.5, Pixtral",
    "llama4": "Llama 4",
    "llava_next": "Llava-Next",
    "llava_onevision": "Llava-OneVision",
    "smolvlm": "SmolVLM, SmolVLM2",
    "idefics3": "Idefics 3, SmolVLM 1",
    "internvl": "InternVL 3 and 3.5 in the format of transformers",
}
"""The same of the models of text and images."""


def first_layers(config: transformers.PretrainedConfig, count: int) -> transformers.PretrainedConfig:
    """Return the config of a model of the first layers of another one, whose layers have types."""
    fewer = copy.deepcopy(config)
    fewer.num_hidden_layers, fewer.layer_types = count, fewer.layer_types[:count]
    return fewer


def native_configs(
    shape: dict[str, Any], *, head_dim: int, wide_head_dim: int
) -> dict[str, transformers.PretrainedConfig]:
    """Return the configs with three layers of the sizes in `shape`. `head_dim` is for those that need not derive it."""
    default_head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    gemma4 = shape | {
        "head_dim": head_dim,
        "global_head_dim": 2 * head_dim,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 19,
        "final_logit_softcapping": 3.0,
        "hidden_size_per_layer_input": 0,
    }
    latent = LATENT | {"num_key_value_heads": shape["num_attention_heads"]}
    latent_experts = latent | {
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    }
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    yarn |= {"mscale": 0.7, "mscale_all_dim": 1.1}
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "llama": transformers.LlamaConfig(**shape),
        "llama, tied": transformers.LlamaConfig(**shape | {"tie_word_embeddings": True}),
        "llama, biases": transformers.LlamaConfig(**shape, attention_bias=True, mlp_bias=True),
        "llama, no grouped queries": transformers.LlamaConfig(
            **shape | {"num_key_value_heads": shape["num_attention_heads"]}
        ),
        "llama, wide heads, gelu": transformers.LlamaConfig(
            **shape, head_dim=wide_head_dim, hidden_act="gelu_pytorch_tanh"
        ),
        "llama, yarn rope": transformers.LlamaConfig(
            **shape,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "mistral": transformers.MistralConfig(**shape, sliding_window=None),
        "mistral, sliding window": transformers.MistralConfig(**shape, sliding_window=19),
        "qwen2": transformers.Qwen2Config(**shape),
        "qwen2, sliding window in some layers": transformers.Qwen2Config(
            **shape, use_sliding_window=True, sliding_window=32, max_window_layers=1
        ),
        "qwen3": transformers.Qwen3Config(**shape, head_dim=head_dim),
        "qwen3, tied": transformers.Qwen3Config(
            **shape | {"tie_word_embeddings": True}, head_dim=head_dim, attention_bias=True
        ),
        "gemma": transformers.GemmaConfig(**shape, head_dim=head_dim),
        "gemma2": transformers.Gemma2Config(
            **shape | {"tie_word_embeddings": True},
            head_dim=head_dim,
            sliding_window=19,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        "gemma3_text": transformers.Gemma3TextConfig(
            **shape, head_dim=head_dim, sliding_window=19, layer_types=mixed, query_pre_attn_scalar=24
        ),
        "gemma3_text, scaled": transformers.Gemma3TextConfig(
            **shape | {"num_hidden_layers": 6},
            head_dim=head_dim,
            sliding_window=32,
            final_logit_softcapping=3.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        "gemma4_text": transformers.Gemma4TextConfig(
            **gemma4 | {"attention_k_eq_v": False},
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
        "gemma4_text, experts": transformers.Gemma4TextConfig(
            **gemma4,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=24,
        ),
        "phi3": transformers.Phi3Config(**shape, sliding_window=40),
        "phi3, partial rotation, longrope": transformers.Phi3Config(
            **shape,
            original_max_position_embeddings=shape["max_position_embeddings"],
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0 + pair for pair in range(default_head_dim // 4)],
                "long_factor": [9.0] * (default_head_dim // 4),
            },
        ),
        "granite": transformers.GraniteConfig(
            **shape,
            attention_bias=True,
            embedding_multiplier=7.0,
            residual_multiplier=0.3,
            attention_multiplier=0.2,
            logits_scaling=4.0,
        ),
        "ministral": transformers.MinistralConfig(
            **shape, head_dim=default_head_dim, sliding_window=19, layer_types=mixed
        ),
        "ministral3": transformers.Ministral3Config(
            **shape,
            head_dim=head_dim,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e5,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        ),
        "glm": transformers.GlmConfig(**shape, head_dim=head_dim),
        "glm4": transformers.Glm4Config(**shape, head_dim=head_dim),
        "gemma3, text part": transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(
                **shape, head_dim=head_dim, sliding_window=19, layer_types=mixed
            ).to_dict(),
            vision_config=transformers.SiglipVisionConfig(**VISION).to_dict(),
            image_token_index=3,
        ),
        "gemma4, text part": transformers.Gemma4Config(
            text_config=transformers.Gemma4TextConfig(**gemma4 | {"pad_token_id": 0}).to_dict(),
            vision_config=transformers.Gemma4VisionConfig(**VISION).to_dict(),
        ),
        "mistral3, text part": transformers.Mistral3Config(
            text_config=transformers.MistralConfig(**shape, head_dim=default_head_dim, sliding_window=None).to_dict(),
            vision_config=transformers.PixtralVisionConfig(**VISION).to_dict(),
            tie_word_embeddings=False,
            image_token_index=3,
        ),
        "seed_oss": transformers.SeedOssConfig(**shape, head_dim=head_dim),
        "smollm3": transformers.SmolLM3Config(**shape, no_rope_layers=[1, 0, 1]),
        "ernie4_5": transformers.Ernie4_5Config(**shape, head_dim=head_dim, use_bias=True),
        "qwen2_moe": transformers.Qwen2MoeConfig(
            **shape,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            decoder_sparse_step=2,
        ),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **shape,
            head_dim=head_dim,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            mlp_only_layers=[1],
            norm_topk_prob=True,
        ),
        "glm4_moe": transformers.Glm4MoeConfig(
            **shape | {"num_key_value_heads": 2},
            head_dim=head_dim,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            use_qk_norm=True,
            attention_bias=True,
            routed_scaling_factor=1.5,
        ),
        "glm4_moe, no norms": transformers.Glm4MoeConfig(
            **shape, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, n_group=2, topk_group=1
        ),
        "mixtral": transformers.MixtralConfig(**shape, num_local_experts=4, sliding_window=19),
        "gpt_oss": transformers.GptOssConfig(
            **shape, head_dim=head_dim, num_local_experts=4, num_experts_per_tok=2, sliding_window=19
        ),
        "deepseek_v3": transformers.DeepseekV3Config(
            **shape | latent_experts, n_group=4, topk_group=2, attention_bias=True, rope_parameters=yarn
        ),
        "deepseek_v2": transformers.DeepseekV2Config(
            **shape | latent_experts, topk_method="group_limited_greedy", n_group=3, topk_group=2, rope_parameters=yarn
        ),
        "deepseek_v2, lite": transformers.DeepseekV2Config(
            **shape | latent_experts | {"q_lora_rank": None},
            routed_scaling_factor=1.5,
            rope_parameters=yarn | {"rope_type": "linear"},
        ),
        "glm4_moe_lite": transformers.Glm4MoeLiteConfig(
            **shape | {key: value for key, value in latent_experts.items() if key != "first_k_dense_replace"},
            mlp_layer_types=["dense", "sparse", "dense"],
            rope_interleave=False,
            rms_norm_eps=0.05,
        ),
        "mistral4": transformers.Mistral4Config(
            **shape | latent_experts,
            n_group=2,
            topk_group=1,
            rope_parameters=yarn | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16},
        ),
        "youtu": transformers.YoutuConfig(**shape | latent),
        "minicpm3": transformers.MiniCPM3Config(**shape | latent | {"v_head_dim": None}, dim_model_base=16),
    } | state_configs(shape, head_dim=head_dim)
