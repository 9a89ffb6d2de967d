"""Families of models that transformers runs in the torch engine: tiny random models of them, for parity tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of all families; a config takes those that it has."""
ROUTER_GAIN = 10.0
GPT_SIZES = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERTS = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 1,
    "mamba_chunk_size": 16,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}


UNLISTED = {"mistral4": "Mistral4ForCausalLM"}
"""Classes for text that AutoModelForCausalLM does not know."""


@dataclass(frozen=True)
class Family:
    """A family: the models that people know, and what differs from SIZES in its tiny config."""

    models: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    features: str = ""
    """Differences to the structure of Llama."""
    always: bool = False
    """Tested in `make test`, not only in `make test-all`."""
    like: str = ""
    """The type whose classes transformers has for it, if it is not the family's own."""
    real: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the real models' config.json that are not those of the class."""


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 2 and 3", always=True),
    "gemma3_text": Family("Gemma 3", features="norms around, two rotations, windows in most layers", always=True),
    "gemma4_text": Family(
        "Gemma 4",
        {
            **EXPERTS,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 2048,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "enable_moe_block": True,
            "top_k_experts": 2,
        },
        features="head sizes by layer, experts beside a dense MLP, inputs of each layer, shared keys and values",
        always=True,
    ),
    "gpt_oss": Family("gpt-oss", EXPERTS, features="sinks, experts with biases", always=True),
    "qwen3_moe": Family(
        "Qwen3-MoE", EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []}, "experts", always=True
    ),
    "glm4_moe": Family("GLM-4.5 to 4.7", SHARED_EXPERTS, "sigmoid router, shared experts", always=True),
    "deepseek_v3": Family("DeepSeek V3", SHARED_EXPERTS | LATENT, "latent attention"),
    "kimi_k2": Family(
        "Kimi K2",
        SHARED_EXPERTS
        | LATENT
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50_000.0,
                "factor": 4.0,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
            }
        },
        "latent attention",
        always=True,
        like="deepseek_v3",
        real={
            "architectures": ["DeepseekV3ForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            "ep_size": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "scoring_func": "sigmoid",
            "seq_aux": True,
            "topk_method": "noaux_tc",
        },
    ),
    "mimo": Family(
        "MiMo 7B",
        {"max_window_layers": 4, "use_sliding_window": False},
        always=True,
        like="qwen2",
        real={
            "architectures": ["MiMoForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
            "num_nextn_predict_layers": 1,
        },
    ),
    "mistral4": Family(
        "Mistral Small 4",
        SHARED_EXPERTS | LATENT | {"head_dim": 16, "qk_nope_head_dim": 8},
        "latent attention, experts",
        always=True,
    ),
    "phimoe": Family("Phi-3.5-MoE", EXPERTS | {"sliding_window": 256}, "experts", always=True),
    "qwen3_5_text": Family("Qwen3.5 to 3.8", LINEAR, "gated delta nets in three of four layers", always=True),
    "qwen3_5_moe_text": Family("Qwen3.5-MoE", LINEAR | SHARED_EXPERTS, "gated delta nets, experts"),
    "qwen3_next": Family(
        "Qwen3-Next",
        LINEAR | SHARED_EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        "gated delta nets, experts",
    ),
    "lfm2": Family(
        "LFM2",
        {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_key_value_heads": 2},
        "short convolutions",
    ),
    "lfm2_moe": Family(
        "LFM2-MoE",
        EXPERTS | {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
        "short convolutions, experts",
    ),
    "falcon_h1": Family("Falcon-H1", MAMBA, "Mamba 2 beside attention in each layer"),
    "bamba": Family(
        "Bamba", MAMBA | {"mamba_expand": 2, "mamba_n_heads": 8, "attn_layer_indices": [1]}, "Mamba 2 in most layers"
    ),
    "granitemoehybrid": Family(
        "Granite 4",
        MAMBA
        | EXPERTS
        | {
            "mamba_expand": 2,
            "mamba_n_heads": 8,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
        },
        "Mamba 2 in most layers, experts",
    ),
    "nemotron_h": Family(
        "Nemotron-H, Nemotron 3",
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        },
        "Mamba 2 in most layers",
    ),
    "olmo_hybrid": Family("OLMo Hybrid", LINEAR, "gated delta nets"),
    "phi3": Family("Phi-3, Phi-4", features="fused projections", always=True),
    "gpt2": Family("GPT-2", GPT_SIZES, "LayerNorm, learned positions", always=True),
    "cohere2": Family("Command R7B, Command A", features="parallel blocks, layers without rotation", always=True),
    "afmoe": Family("Trinity (Arcee)", SHARED_EXPERTS | {"num_dense_layers": 1}, "gated attention, experts"),
    "apertus": Family("Apertus", features="xIELU"),
    "arcee": Family("Arcee AFM", features="squared ReLU"),
    "biogpt": Family("BioGPT", features="LayerNorm, learned positions"),
    "bitnet": Family("BitNet (unpacked)", features="norms inside attention and MLP"),
    "cohere": Family("Command R", features="parallel blocks, LayerNorm"),
    "cwm": Family("Code World Model", features="windows in most layers"),
    "deepseek_v2": Family("DeepSeek V2", SHARED_EXPERTS | LATENT, "latent attention, experts"),
    "diffllama": Family("DiffLlama", features="differential attention"),
    "dots1": Family("dots.llm1", SHARED_EXPERTS, "experts"),
    "ernie4_5": Family("ERNIE 4.5"),
    "ernie4_5_moe": Family("ERNIE 4.5 MoE", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}, "experts"),
    "exaone4": Family("EXAONE 4", features="norms after blocks, layers without rotation"),
    "flex_olmo": Family("FlexOlmo", EXPERTS, "experts"),
    "gemma": Family("Gemma 1", features="zero-centred norms"),
    "gemma2": Family("Gemma 2", features="softcap, norms around"),
    "gemma3n_text": Family(
        "Gemma 3n",
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0},
        "inputs of each layer, several residual streams",
    ),
    "glm": Family("GLM-4 9B", features="interleaved partial rotation"),
    "glm4": Family("GLM-4-0414", features="norms around"),
    "glm4_moe_lite": Family("GLM-4.7-Flash", SHARED_EXPERTS | LATENT, "latent attention, experts"),
    "gpt_bigcode": Family("StarCoder", GPT_SIZES, "one KV head, learned positions"),
    "gpt_neox": Family("Pythia, GPT-NeoX", features="parallel blocks, partial rotation"),
    "granite": Family("Granite 3", features="multipliers"),
    "granitemoe": Family("Granite 3 MoE", EXPERTS, "experts"),
    "granitemoeshared": Family(
        "Granite 3 MoE with shared experts", EXPERTS | {"shared_intermediate_size": 32}, "experts"
    ),
    "helium": Family("Helium"),
    "hunyuan_v1_dense": Family("Hunyuan dense", features="norms of queries and keys after rotation"),
    "hunyuan_v1_moe": Family("Hunyuan MoE", EXPERTS | {"moe_topk": 2, "num_shared_expert": 1}, "experts"),
    "jetmoe": Family("JetMoE", EXPERTS | {"kv_channels": 16}, "experts in attention too"),
    "llama4_text": Family(
        "Llama 4",
        EXPERTS
        | {"attention_chunk_size": 24, "floor_scale": 16, "intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 0, 1]},
        "attention by chunks, scale of queries by position, experts",
    ),
    "minimax_m2": Family("MiniMax-M2", EXPERTS, "experts, partial rotation"),
    "ministral": Family("Ministral", features="windows"),
    "ministral3": Family("Ministral 3", features="query scale by position"),
    "mistral": Family("Mistral", features="windows"),
    "mixtral": Family("Mixtral", EXPERTS, "experts"),
    "modernbert-decoder": Family("ModernBERT decoders", features="windows, LayerNorm"),
    "nanochat": Family("nanochat", features="softcap of logits"),
    "nemotron": Family("Nemotron 4, Minitron", features="LayerNorm + 1, squared ReLU"),
    "olmo": Family("OLMo 1", features="LayerNorm without weights"),
    "olmo2": Family("OLMo 2", features="norms after blocks"),
    "olmo3": Family("OLMo 3", features="norms after blocks, windows"),
    "olmoe": Family("OLMoE", EXPERTS, "experts"),
    "opt": Family("OPT", {"word_embed_proj_dim": 64, "ffn_dim": 96}, "LayerNorm, learned positions"),
    "persimmon": Family("Persimmon", features="LayerNorm, fused projections"),
    "phi": Family("Phi-1, Phi-2", features="parallel blocks, partial rotation"),
    "qwen2": Family("Qwen2.5"),
    "qwen2_moe": Family(
        "Qwen1.5-MoE, Qwen2-MoE", SHARED_EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []}, "experts"
    ),
    "qwen3": Family("Qwen3"),
    "seed_oss": Family("Seed-OSS"),
    "smollm3": Family("SmolLM3", {"no_rope_layers": None}, "layers without rotation"),
    "solar_open": Family("Solar Open", SHARED_EXPERTS, "experts"),
    "stablelm": Family("StableLM 2", features="LayerNorm, partial rotation"),
    "starcoder2": Family("StarCoder2", features="LayerNorm"),
    "vaultgemma": Family("VaultGemma", features="softcap"),
    "axk1": Family("A.X K1", SHARED_EXPERTS | LATENT, "latent attention, experts"),
    "kimi_linear": Family(
        "Kimi Linear",
        SHARED_EXPERTS
        | LATENT
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
        "gated delta nets in most layers, latent attention, experts",
    ),
    "zaya": Family(
        "ZAYA1", EXPERTS | {"num_experts_per_tok": 1}, "convolutions of queries, keys and values, experts", always=True
    ),
}


def tiny_config(model_type: str, changes: Mapping[str, Any]) -> PretrainedConfig:
    """Return a config of `model_type` with the sizes that it has."""
    family = FAMILIES.get(model_type)
    config_class = CONFIG_MAPPING[model_type if family is None else family.like or model_type]
    fields: set[str] = set()
    for base in config_class.__mro__:
        fields |= set(getattr(base, "__annotations__", {}))
    return config_class(**{name: value for name, value in (SIZES | dict(changes)).items() if name in fields})


def random_model(config: PretrainedConfig, kind: type = AutoModelForCausalLM) -> PreTrainedModel:
    """Return a model of `config` with random weights, the same each time."""
    torch.manual_seed(5)
    own = getattr(transformers, UNLISTED[config.model_type]) if config.model_type in UNLISTED else None
    model = (own(config) if own else kind.from_config(config, attn_implementation="eager")).eval().float()
    for weight in model.parameters():
        # Norms and biases are initialized to ones and zeros, which would hide a mix-up.
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0.0, 0.08)
        else:
            weight.data += torch.randn_like(weight) * 0.1
    for name, factor in model.named_buffers():
        if name.endswith("layer_scalar"):
            factor += torch.randn_like(factor) * 0.1
    return model


def conditioned(model: PreTrainedModel) -> PreTrainedModel:
    """Change a model so that rounding seldom decides: distinct scores of experts, and flat weights of attention."""
    for name, weight in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "router.weight")):
            weight.data *= ROUTER_GAIN
        elif name.endswith("router.proj.weight"):
            # Gemma 4 divides the input of its router by √hidden.
            weight.data *= ROUTER_GAIN * weight.shape[1] ** 0.5
        elif name.endswith("self_attn.q_norm.weight") and model.config.model_type.startswith("gemma4"):
            # Nothing else scales the products of query and key, as the head's size does elsewhere.
            weight.data *= len(weight) ** -0.5
    return model


def write_model(model: PreTrainedModel, folder: Path, name: str = "") -> str:
    """Write the checkpoint of `model`, with the config.json of the family `name`; return its folder."""
    model.save_pretrained(folder)
    if name in FAMILIES and (real := FAMILIES[name].real):
        values = json.loads((folder / "config.json").read_text()) | {"model_type": name} | dict(real)
        (folder / "config.json").write_text(json.dumps(values))
    return str(folder)
