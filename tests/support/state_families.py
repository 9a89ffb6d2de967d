"""Tiny configs of the families of layers with a state that the torch engine computes itself."""

from __future__ import annotations

from typing import Any

import transformers

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def state_configs(shape: dict[str, Any], *, head_dim: int) -> dict[str, transformers.PretrainedConfig]:
    """Return the configs, as `native_configs` does."""
    hybrid = {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": head_dim,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
    mamba = {
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_d_head": 2 * shape["hidden_size"] // 8,
        "mamba_chunk_size": 16,
    }
    hybrid_experts = hybrid | {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }
    return {
        "qwen3_5_text": transformers.Qwen3_5TextConfig(**shape, **hybrid),
        "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig(**shape, **hybrid_experts, linear_conv_kernel_dim=7),
        "qwen3_next": transformers.Qwen3NextConfig(
            **shape, **hybrid_experts | {"shared_expert_intermediate_size": 24}, mlp_only_layers=[1]
        ),
        "qwen3_5_moe, text part": transformers.Qwen3_5MoeConfig(
            text_config=transformers.Qwen3_5MoeTextConfig(**shape, **hybrid_experts).to_dict(),
            vision_config={**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": shape["hidden_size"]},
        ),
        "olmo_hybrid": transformers.OlmoHybridConfig(
            **shape | {"num_key_value_heads": shape["num_attention_heads"]},
            **{key: value for key, value in hybrid.items() if key != "head_dim"},
            linear_conv_kernel_dim=3,
            rope_parameters={"rope_type": "default", "rope_theta": None},
        ),
        "olmo_hybrid, with rotation": transformers.OlmoHybridConfig(
            **shape,
            **{key: value for key, value in hybrid.items() if key != "head_dim"},
            linear_allow_neg_eigval=False,
        ),
        "granitemoehybrid": transformers.GraniteMoeHybridConfig(
            **shape,
            **mamba,
            num_local_experts=6,
            num_experts_per_tok=3,
            shared_intermediate_size=40,
            layer_types=["mamba", "attention", "mamba"],
            embedding_multiplier=3.0,
            residual_multiplier=0.6,
            attention_multiplier=0.2,
            logits_scaling=4.0,
        ),
        "granitemoehybrid, dense, with rotation": transformers.GraniteMoeHybridConfig(
            **shape,
            **mamba,
            num_local_experts=0,
            shared_intermediate_size=40,
            position_embedding_type="rope",
            layer_types=["mamba", "mamba", "attention"],
            mamba_proj_bias=True,
        ),
        "bamba": transformers.BambaConfig(**shape, **mamba, mamba_d_conv=2, attn_layer_indices=[1], mlp_bias=True),
        "falcon_h1": transformers.FalconH1Config(
            **shape,
            **mamba | {"mamba_d_ssm": 64, "mamba_d_head": 8, "mamba_n_groups": 1},
            lm_head_multiplier=0.5,
            embedding_multiplier=2.0,
            mlp_multipliers=[0.7, 1.2],
            key_multiplier=0.6,
            attention_in_multiplier=1.3,
            attention_out_multiplier=0.8,
            ssm_in_multiplier=1.1,
            ssm_out_multiplier=0.7,
            ssm_multipliers=[0.8, 1.1, 0.9, 1.2, 0.7],
        ),
        "falcon_h1, normed": transformers.FalconH1Config(
            **shape, **mamba | {"mamba_d_ssm": 64, "mamba_d_head": 8}, mamba_rms_norm=True
        ),
        "lfm2": transformers.Lfm2Config(
            **shape | {"tie_word_embeddings": True},
            layer_types=["conv", "full_attention", "conv"],
            conv_bias=True,
            block_multiple_of=16,
        ),
        "lfm2_moe": transformers.Lfm2MoeConfig(
            **shape,
            layer_types=["conv", "full_attention", "conv"],
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            num_dense_layers=1,
            conv_L_cache=5,
            routed_scaling_factor=1.5,
        ),
        # The library never ties its embeddings, whatever the config says.
        "nemotron_h": transformers.NemotronHConfig(
            **{key: value for key, value in shape.items() if key != "num_hidden_layers"}
            | {"tie_word_embeddings": True},
            head_dim=head_dim,
            layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
            mamba_num_heads=8,
            mamba_head_dim=12,
            n_groups=2,
            ssm_state_size=12,
            chunk_size=16,
            mlp_bias=True,
        ),
        "nemotron_h, experts": transformers.NemotronHConfig(
            **{key: value for key, value in shape.items() if key != "num_hidden_layers"},
            head_dim=head_dim,
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
            mamba_num_heads=8,
            mamba_head_dim=12,
            n_groups=2,
            ssm_state_size=12,
            chunk_size=16,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=40,
            routed_scaling_factor=1.5,
            n_group=2,
            topk_group=1,
        ),
    }
