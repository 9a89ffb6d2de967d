"""The models of text and images whose text part this engine computes itself, by config.json's model_type."""

from __future__ import annotations

from dataclasses import replace

from text_generation_shard.engines.torch.models.native.expert_config import ExpertFamily
from text_generation_shard.engines.torch.models.native.expert_families import DENSE, SIGMOID_EXPERTS
from text_generation_shard.engines.torch.models.native.family import Family, NormNames, Wrapper

MANY = 64
"""Images of a prompt, if the model itself sets no limit."""
WRAPPERS: dict[str, Wrapper] = {
    "gemma3": Wrapper(
        "Gemma3ForConditionalGeneration", "gemma3_text", ties=True, max_images=MANY, bidirectional_images="all layers"
    ),
    "gemma4": Wrapper(
        "Gemma4ForConditionalGeneration",
        "gemma4_text",
        ties=True,
        max_images=MANY,
        bidirectional_images="layers with a window",
    ),
    "qwen2_vl": Wrapper("Qwen2VLForConditionalGeneration", "qwen2_vl_text", ties=False, max_images=MANY, is_flat=True),
    "qwen2_5_vl": Wrapper(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", ties=False, max_images=MANY, is_flat=True
    ),
    "qwen3_vl": Wrapper("Qwen3VLForConditionalGeneration", "qwen3_vl_text", ties=False, max_images=MANY),
    "qwen3_vl_moe": Wrapper("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", ties=False, max_images=MANY),
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text", ties=False, max_images=MANY),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", ties=False, max_images=MANY),
    "glm4v": Wrapper("Glm4vForConditionalGeneration", "glm4v_text", ties=False, max_images=MANY),
    "glm46v": Wrapper("Glm46VForConditionalGeneration", "glm4v_text", ties=False, max_images=MANY),
    "glm4v_moe": Wrapper("Glm4vMoeForConditionalGeneration", "glm4v_moe_text", ties=False, max_images=MANY),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral", ties=True, max_images=MANY),
    # Transformers runs its text part.
    "llama4": Wrapper("Llama4ForConditionalGeneration", "llama4_text", ties=False, max_images=MANY),
    "llava": Wrapper("LlavaForConditionalGeneration", "llama", ties=False, max_images=MANY),
    "llava_next": Wrapper("LlavaNextForConditionalGeneration", "llama", ties=False, max_images=MANY),
    # With several images, the library does not divide them into tiles.
    "llava_onevision": Wrapper("LlavaOnevisionForConditionalGeneration", "qwen2", ties=False, max_images=1),
    "smolvlm": Wrapper("SmolVLMForConditionalGeneration", "llama", ties=False, max_images=MANY),
    "idefics3": Wrapper("Idefics3ForConditionalGeneration", "llama", ties=False, max_images=MANY),
    "internvl": Wrapper("InternVLForConditionalGeneration", "qwen2", ties=False, max_images=MANY),
}
"""By model_type."""

QWEN2_VL = Family(
    "Qwen2VLForConditionalGeneration",
    vocab_size=152_064,
    num_heads=64,
    max_positions=32_768,
    num_kv_heads=8,
    rms_norm_eps=1e-5,
    qkv_bias=True,
    rope_theta=1_000_000.0,
    rotary_sections=(16, 24, 24),
    windows="use_sliding_window",
    window=4096,
)
QWEN3_VL = Family(
    "Qwen3VLForConditionalGeneration",
    vocab_size=151_936,
    num_heads=32,
    max_positions=128_000,
    num_kv_heads=32,
    head_dim=128,
    qkv_bias=("attention_bias", False),
    output_bias=("attention_bias", False),
    query_key_norm=True,
    rope_theta=500_000.0,
    rotary_sections=(24, 20, 20),
    alternating_axes=True,
)
GLM4V = Family(
    "Glm4vForConditionalGeneration",
    vocab_size=151_552,
    num_heads=32,
    max_positions=32_768,
    num_kv_heads=2,
    rms_norm_eps=1e-5,
    qkv_bias=True,
    fused_gate_up=True,
    partial_rotary=1.0,
    interleaved_rotary=True,
    rotary_sections=(8, 12, 12),
    norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
)

TEXT_PARTS = {
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": replace(QWEN2_VL, architecture="Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl_text": QWEN3_VL,
    "qwen3_vl_moe_text": replace(
        QWEN3_VL,
        architecture="Qwen3VLMoeForConditionalGeneration",
        num_heads=16,
        num_kv_heads=16,
        head_dim=None,
        tie_word_embeddings=True,
        experts=ExpertFamily(60, 4, inner=1408, sparse_layers=True, may_transpose=True),
    ),
    "glm4v_text": GLM4V,
    "glm4v_moe_text": replace(
        GLM4V,
        architecture="Glm4vMoeForConditionalGeneration",
        vocab_size=151_424,
        num_heads=96,
        max_positions=65_536,
        num_kv_heads=8,
        qkv_bias=("attention_bias", True),
        fused_gate_up=False,
        partial_rotary=0.5,
        interleaved_rotary=False,
        norms=NormNames(),
        experts=replace(SIGMOID_EXPERTS, count=128, inner=1408, dense_layers=(DENSE, 1), scale=1.0, groups=(1, 1)),
    ),
}
"""The families of text parts that only models of text and images have."""
