"""The families of decoders that this engine computes itself, by config.json's model_type.

A family is its differences from Llama, with the defaults of its config class in transformers, which a config.json may omit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from text_generation_shard.engines.torch.models.native.expert_config import ExpertFamily
from text_generation_shard.engines.torch.models.native.state_config import DELTA_NET_FIELDS, StateFamily

Flag = bool | tuple[str, bool]
"""A fixed switch, or a field of config.json with its default."""


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names of the norms of a layer in a checkpoint."""

    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model of text and images, of which the text part is served."""

    architecture: str
    text_type: str
    """Default model_type of the text part."""
    ties: bool
    """Default of tie_word_embeddings."""


WRAPPERS: dict[str, Wrapper] = {
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text", ties=True),
    "gemma4": Wrapper("Gemma4ForConditionalGeneration", "gemma4_text", ties=True),
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text", ties=False),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", ties=False),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral", ties=True),
    "llava": Wrapper("LlavaForConditionalGeneration", "llama", ties=False),
}
"""By model_type."""


@dataclass(frozen=True, slots=True)
class Family:
    """The switches of a model_type, and the defaults of the fields that config.json may omit."""

    architecture: str
    """The architecture of this type that generates text."""
    vocab_size: int | None = None
    num_heads: int | None = None
    max_positions: int | None = None
    """Defaults of sizes, where checkpoints omit them; None: config.json must have them."""
    intermediate_size: int | None = None
    """The default, where no layer has a dense MLP."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """None: num_attention_heads."""
    full_head_dim: int | None = None
    """Default of global_head_dim, of the layers without a window; None: all layers have the same heads."""
    activation: str = "silu"
    activation_field: str = "hidden_act"
    gelu_by_tanh: bool = False
    """True: the activation `gelu` means its approximation by tanh, as in the first checkpoints of Gemma."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: Flag = False
    output_bias: Flag = False
    mlp_bias: Flag = False
    query_key_norm: bool = False
    value_norm: bool = False
    """True: each value head is normed too, without a weight."""
    layer_scalars: bool = False
    """True: the residual stream is multiplied by a number after each layer."""
    zero_centered_norms: bool = False
    """True: a norm multiplies by 1 + weight."""
    norms: NormNames = NormNames()
    fused_qkv: bool = False
    """True: a checkpoint has one tensor for query, key and value."""
    fused_gate_up: bool = False
    rope_theta: float = 10_000.0
    rope: tuple[tuple[str, str | float], ...] = ()
    """Default of rope_parameters, without rope_theta."""
    local_rope_theta: float | None = None
    """The rope_theta of layers with a window; None: that of the other layers."""
    partial_rotary: float | None = None
    """Default of partial_rotary_factor, the part of a head that is rotated; None: heads are rotated whole."""
    interleaved_rotary: bool = False
    """True: dimensions 2i and 2i + 1 are rotated together, not i and i + half of the head."""
    no_rope_interval: int = 0
    """Default of no_rope_layer_interval: every n-th layer has no rotation; 0: all layers have one."""
    windows: Literal[
        "none",
        "all layers",
        "use_sliding_window",
        "use_sliding_window, all layers",
        "use_sliding_window, every second layer",
        "use_sliding_window, layers without rotation",
        "layer_types",
        "layer_types, none in the last layer",
    ] = "none"
    """The layers with a window: see `config._windows`."""
    window: int | None = None
    """Default of sliding_window."""
    window_pattern: int = 1
    """Without layer_types, every layer has a window but each n-th, if n > 1."""
    attention_scale: Literal["head_dim", "query_pre_attn_scalar", "attention_multiplier", "one"] = "head_dim"
    """The field that scales the products of query and key: the first two by the inverse of its square root."""
    attention_softcap: float | None = None
    """Default of attn_logit_softcapping; None: the family does not cap."""
    final_softcap: float | None = None
    """Default of final_logit_softcapping."""
    scales_embedding: bool = False
    """True: embeddings are multiplied by √hidden_size."""
    gated_attention: bool = False
    """True: the query projection has a gate for each query value, which the output of attention is multiplied with."""
    sinks: bool = False
    """True: the softmax of attention counts one more score per head, without a value."""
    experts: ExpertFamily | None = None
    states: StateFamily | None = None
    """The layers with a state; None: all layers have attention."""
    multipliers: bool = False
    """True: the config has embedding_multiplier, residual_multiplier and logits_scaling."""
    unsupported: tuple[tuple[str, int], ...] = ()
    """Fields with their defaults; models in which one is not 0 are computed by transformers."""


ATTENTION_BIAS = ("attention_bias", False)
MLP_BIAS = ("mlp_bias", False)
NORM_TOPK = ("norm_topk_prob", False)

GEMMA = Family(
    "GemmaForCausalLM",
    num_kv_heads=16,
    head_dim=256,
    activation="gelu_pytorch_tanh",
    gelu_by_tanh=True,
    tie_word_embeddings=True,
    qkv_bias=ATTENTION_BIAS,
    output_bias=ATTENTION_BIAS,
    zero_centered_norms=True,
    scales_embedding=True,
)
GEMMA2 = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    num_kv_heads=4,
    activation_field="hidden_activation",
    gelu_by_tanh=False,
    # `post_attention_layernorm` is not the norm before the MLP.
    norms=NormNames(
        before_mlp="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    windows="layer_types",
    window=4096,
    window_pattern=2,
    attention_scale="query_pre_attn_scalar",
    attention_softcap=50.0,
    final_softcap=30.0,
)
GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    vocab_size=262_208,
    num_heads=8,
    max_positions=131_072,
    query_key_norm=True,
    rope_theta=1_000_000.0,
    local_rope_theta=10_000.0,
    window_pattern=6,
    attention_softcap=None,
    final_softcap=None,
)
QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    vocab_size=248_320,
    num_heads=16,
    max_positions=32_768,
    num_kv_heads=4,
    head_dim=256,
    qkv_bias=ATTENTION_BIAS,
    output_bias=ATTENTION_BIAS,
    query_key_norm=True,
    zero_centered_norms=True,
    partial_rotary=0.25,
    gated_attention=True,
    states=StateFamily("delta_net", "linear_attn", DELTA_NET_FIELDS, attention_interval=4),
)
GLM = Family(
    "GlmForCausalLM",
    num_kv_heads=2,
    head_dim=128,
    rms_norm_eps=1.5625e-07,
    qkv_bias=("attention_bias", True),
    fused_gate_up=True,
    partial_rotary=0.5,
    interleaved_rotary=True,
)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, mlp_bias=MLP_BIAS),
    "mistral": Family("MistralForCausalLM", num_kv_heads=8, windows="all layers", window=4096),
    "ministral": Family("MinistralForCausalLM", num_kv_heads=8, windows="layer_types", window=4096),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        rope=(
            ("rope_type", "yarn"),
            ("factor", 16.0),
            ("original_max_position_embeddings", 16384),
            ("mscale", 1.0),
            ("mscale_all_dim", 1.0),
            ("llama_4_scaling_beta", 0.1),
        ),
        windows="all layers",
    ),
    "qwen2": Family("Qwen2ForCausalLM", num_kv_heads=32, qkv_bias=True, windows="use_sliding_window", window=4096),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        num_kv_heads=32,
        head_dim=128,
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        query_key_norm=True,
        windows="use_sliding_window",
        window=4096,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        num_kv_heads=16,
        qkv_bias=("qkv_bias", True),
        windows="use_sliding_window, every second layer",
        window=4096,
        experts=ExpertFamily(60, 4, inner=1408, shared_inner=5632, normalize=NORM_TOPK, sparse_layers=True),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        num_kv_heads=4,
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        query_key_norm=True,
        windows="use_sliding_window, all layers",
        window=4096,
        experts=ExpertFamily(128, 8, inner=768, normalize=NORM_TOPK, sparse_layers=True),
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(
        QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        num_kv_heads=2,
        intermediate_size=512,
        experts=ExpertFamily(256, 8, inner=512, shared_inner=512),
    ),
    "qwen3_next": replace(
        QWEN3_5,
        architecture="Qwen3NextForCausalLM",
        vocab_size=151_936,
        num_kv_heads=2,
        states=StateFamily("delta_net", "linear_attn", DELTA_NET_FIELDS, attention_interval=4, fused=True),
        experts=ExpertFamily(
            512, 10, inner=512, shared_inner=512, normalize=("norm_topk_prob", True), sparse_layers=True
        ),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        windows="all layers",
        experts=ExpertFamily(8, 2, module="block_sparse_moe", names=("w1", "w3", "w2")),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        qkv_bias=("attention_bias", True),
        output_bias=("attention_bias", True),
        rope_theta=150_000.0,
        rope=(("rope_type", "yarn"), ("factor", 32.0), ("truncate", False), ("original_max_position_embeddings", 4096)),
        windows="layer_types",
        window=128,
        window_pattern=2,
        sinks=True,
        experts=ExpertFamily(128, 4, router="router", clamped=True),
    ),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma4_text": replace(
        GEMMA3,
        architecture="Gemma4ForCausalLM",
        vocab_size=262_144,
        full_head_dim=512,
        value_norm=True,
        layer_scalars=True,
        zero_centered_norms=False,
        rope=(("rope_type", "proportional"), ("partial_rotary_factor", 0.25)),
        windows="layer_types, none in the last layer",
        window=512,
        attention_scale="one",
        experts=ExpertFamily(
            0,
            0,
            each_field="top_k_experts",
            enabled_by="enable_moe_block",
            beside_mlp=True,
            inner=0,
            module="",
            router="router.proj",
        ),
        unsupported=(("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        rms_norm_eps=1e-5,
        fused_qkv=True,
        fused_gate_up=True,
        partial_rotary=1.0,
        windows="all layers",
    ),
    "granite": Family(
        "GraniteForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        mlp_bias=MLP_BIAS,
        attention_scale="attention_multiplier",
        multipliers=True,
    ),
    "glm": GLM,
    "glm4": replace(
        GLM,
        architecture="Glm4ForCausalLM",
        norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        num_kv_heads=8,
        head_dim=128,
        qkv_bias=("attention_bias", True),
        output_bias=("attention_out_bias", False),
        mlp_bias=MLP_BIAS,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        num_kv_heads=4,
        tie_word_embeddings=True,
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        mlp_bias=MLP_BIAS,
        rope_theta=2_000_000.0,
        no_rope_interval=4,
        windows="use_sliding_window, layers without rotation",
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        num_kv_heads=2,
        head_dim=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        qkv_bias=("use_bias", False),
        output_bias=("use_bias", False),
        mlp_bias=("use_bias", False),
        rope_theta=500_000.0,
        interleaved_rotary=True,
    ),
}
